"""LibreOffice's help in English and five other languages, by paragraph, as a TFDS dataset.

The pages of two Debian packages `libreoffice-help-*` (MPL-2.0) are joined on (file, paragraph id).
Whole files go to one split, so a test paragraph never has its neighbours in the training set.
"""

import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import Any

import tensorflow_datasets as tfds

from crossattn.data import archives, fetch, records
from crossattn.data.errors import DataError, absent
from crossattn.data.sources import Example, MappedSource, hashed_split

FORM = "libreoffice_help/en-X or libreoffice_help/X-en"
LANGUAGES = ("fr", "de", "es", "ja", "hi")
PREFIX = "usr/share/libreoffice/help/"
_PARAGRAPH_ID = re.compile(r"(?:par|hd)_")
_PARAGRAPH_TAGS = {"p", "h1", "h2", "h3", "h4", "h5", "h6"}
BODY = '<div id="DisplayArea"'  # the frame before it has no paragraphs


def open_split(direction: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns the paragraphs of a split."""
    pair = direction.split("-")
    if len(pair) != 2 or "en" not in pair or not set(pair) & set(LANGUAGES):
        raise DataError(
            f"libreoffice_help has no direction {direction!r}; expected en-X or X-en, "
            f"X of {', '.join(LANGUAGES)}"
        )
    source, target = pair
    other = target if source == "en" else source
    rows = records.prepared(LibreofficeHelp, f"en-{other}", split, data_dir)
    return MappedSource(rows, functools.partial(records.pair_of, source=source, target=target))


class LibreofficeHelp(records.PackageBuilder):
    """Configs `en-fr`, `en-de`, `en-es`, `en-ja`, `en-hi`; features `id` and a text a language."""

    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=f"en-{language}", description=f"English and {language}")
        for language in LANGUAGES
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        target = self.builder_config.name.removeprefix("en-")
        texts = {"en": tfds.features.Text(), target: tfds.features.Text()}
        return self.described(
            __doc__,
            {"id": tfds.features.Text(), **texts},
            "https://help.libreoffice.org",
            "MPL-2.0",
            supervised_keys=("en", target),
        )

    def _split_generators(self, dl_manager):
        target = self.builder_config.name.removeprefix("en-")
        packages = ["libreoffice-help-en-us", f"libreoffice-help-{target}"]
        english, other = fetch.debian_packages(packages, self.files_dir)
        pairs = join_pages(
            read_pages(archives.read_deb(english, f"{PREFIX}en-US/text/", ".html")),
            read_pages(archives.read_deb(other, f"{PREFIX}{target}/text/", ".html")),
        )
        if not pairs:
            reason = f"{english.name} and {other.name} have no paragraph in common"
            raise absent(["packages of one release"], english.parent, reason)
        return self.by_split(
            (split_of(file), {"id": f"{file}#{paragraph}", "en": source, target: translation})
            for file, paragraph, source, translation in pairs
        )


def split_of(file: str) -> str:
    """Returns the split of a page, from its path relative to `text/`: 5 % test, 5 % validation."""
    return hashed_split(file, test=5, validation=5)


def read_pages(
    pages: Iterator[tuple[str, bytes]], reader: type["Paragraphs"] | None = None
) -> dict[tuple[str, str], str | None]:
    """Returns the text of each paragraph by (file, paragraph id); None where a page joins variants."""
    texts: dict[tuple[str, str], str | None] = {}
    for file, content in sorted(pages):
        page = content.decode("utf-8")
        parser = (reader or Paragraphs)()
        parser.feed(page[max(page.find(BODY), 0) :])
        parser.close()
        for paragraph, text in parser.paragraphs:
            texts.setdefault((file, paragraph), text)
    return texts


def join_pages(
    source: dict[tuple[str, str], str | None], target: dict[tuple[str, str], str | None]
) -> list[tuple[str, str, str, str]]:
    """Returns (file, paragraph id, source, target): each source text once, none left untranslated."""
    seen: set[str] = set()
    pairs = []
    for key, text in source.items():
        translation = target.get(key)
        if text and translation and text != translation and text not in seen:
            seen.add(text)
            pairs.append((*key, text, translation))
    return pairs


class Paragraphs(HTMLParser):
    """Collects (id, text) of the paragraphs and headings of a help page.

    The pages hold the variants of a wording (Mac or PC keys, Writer or Calc) side by side in one
    `switchinline` span and hide all but one by script. The bare text would run them together
    ("CommandCtrl+C"), so a paragraph with two variants that say something is marked with None.
    """

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[tuple[str, str | None]] = []
        self._begin(None)

    def _begin(self, name: str | None) -> None:
        self._id: str | None = name
        self._text: list[str] = []
        self._joined = False
        self._depth = 0  # of spans
        self._switches: list[tuple[int, list[int]]] = []  # depth, characters of each variant

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begins a paragraph, or a span whose variants are counted."""
        if tag in _PARAGRAPH_TAGS:
            self._end()
            name = dict(attrs).get("id") or ""
            self._begin(name if _PARAGRAPH_ID.match(name) else None)
        elif self._id is not None and tag == "br":
            self._text.append(" ")
        elif self._id is not None and tag == "span":
            if self._switches and self._depth == self._switches[-1][0]:
                self._switches[-1][1].append(0)
            self._depth += 1
            if dict(attrs).get("class") == "switchinline":
                self._switches.append((self._depth, []))

    def handle_endtag(self, tag: str) -> None:
        """Ends a paragraph or a span."""
        if tag in _PARAGRAPH_TAGS:
            self._end()
        elif self._id is not None and tag == "span":
            if self._switches and self._depth == self._switches[-1][0]:
                variants = self._switches.pop()[1]
                self._joined |= sum(characters > 0 for characters in variants) > 1
            self._depth -= 1

    def handle_data(self, data: str) -> None:
        """Adds text to the paragraph and to its variant."""
        if self._id is not None:
            self._text.append(data)
            for _, variants in self._switches:
                if variants:
                    variants[-1] += len(data.strip())

    def _end(self) -> None:
        text = clean(" ".join("".join(self._text).split()))
        if self._id is not None and text:
            self.paragraphs.append((self._id, None if self._joined else text))
        self._begin(None)


def clean(text: str) -> str:
    """Returns a text in Unicode NFC without soft hyphens or zero-width spaces."""
    return unicodedata.normalize("NFC", text.replace("\u00ad", "").replace("\u200b", ""))
