"""LibreOffice's help in English and five other languages, two of them by paragraph, as a TFDS dataset.

The pages of two Debian packages `libreoffice-help-*` (MPL-2.0) are joined on (file, paragraph id).
Whole files go to one split, so a test paragraph never has its neighbours in the training set. The texts are
without markup; an example has as "phrases" what translators tagged alike on both sides, see `data.tags`.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from crossattn.data import archives, fetch, records
from crossattn.data.errors import DataError, absent
from crossattn.data.sources import (
    Example,
    MappedSource,
    Option,
    hashed_split,
    reversed_example,
)
from crossattn.data.tags import KINDS, Tag, Tagged, glossary, phrases

FORM = "libreoffice_help/X-Y"
OPTIONS = {
    "pairs": Option(int, "Training pairs, at equal distances; 0 is all.", "[0, inf)"),
    "held_out": Option(int, "Pairs of each other split, likewise; 0 is all.", "[0, inf)"),
}
LANGUAGES = ("fr", "de", "es", "ja", "hi")  # besides English
_PAIRS = [*itertools.combinations(("en", *LANGUAGES), 2)]
PREFIX = "usr/share/libreoffice/help/"
_PARAGRAPH_ID = re.compile(r"(?:par|hd)_")
_PARAGRAPH_TAGS = {"p", "h1", "h2", "h3", "h4", "h5", "h6"}
BODY = '<div id="DisplayArea"'  # the frame before it has no paragraphs


def open_split(
    direction: str, split: str, *, data_dir: Any = None, pairs: int = 0, held_out: int = 0
) -> Sequence[Example]:
    """Returns the paragraphs of a split, or so many of them."""
    languages = tuple(direction.split("-"))
    there = languages in _PAIRS
    if not there and languages[::-1] not in _PAIRS:
        raise DataError(
            f"libreoffice_help has no direction {direction!r}; expected X-Y, two of en, "
            f"{', '.join(LANGUAGES)}"
        )
    first, second = languages if there else languages[::-1]
    rows = records.prepared(LibreofficeHelp, f"{first}-{second}", split, data_dir)
    count, name = (pairs, "pairs") if split == "train" else (held_out, "held_out")
    if not 0 <= count <= len(rows):
        raise DataError(
            f"data.options.{name} is {count}; the {split} split of {first}-{second} has {len(rows)}"
            " pairs"
        )
    if count:
        chosen = [i * len(rows) // count for i in range(count)]
        rows = MappedSource(chosen, rows.__getitem__)
    found = MappedSource(rows, functools.partial(_pair, source=first, target=second))
    return found if there else MappedSource(found, reversed_example)


def _pair(row: dict[str, Any], source: str, target: str) -> Example:
    example = records.pair_of(row, source=source, target=target)
    return example | {"family": example["id"].partition("#")[0]}


class LibreofficeHelp(records.PackageBuilder):
    """Configs of two languages, `en-fr`, `fr-de` and so on; features `id` and a text a language.

    `phrases` [n, 4] are the characters of a tag in the first and in the second language, `kinds` their kinds.
    """

    VERSION = tfds.core.Version("1.1.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=f"{first}-{second}", description=f"{first} and {second}")
        for first, second in _PAIRS
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        first, second = self.builder_config.name.split("-")
        names = ("id", first, second, "kinds")
        spans = tfds.features.Tensor(shape=(None, 4), dtype=np.int32)
        return self.described(
            __doc__,
            {name: tfds.features.Text() for name in names} | {"phrases": spans},
            "https://help.libreoffice.org",
            "MPL-2.0",
            supervised_keys=(first, second),
        )

    def _split_generators(self, dl_manager):
        first, second = self.builder_config.name.split("-")
        regions = [{"en": "en-US"}.get(language, language) for language in (first, second)]
        packages = [f"libreoffice-help-{region.lower()}" for region in regions]
        files = fetch.debian_packages(packages, self.files_dir)
        pages = (
            read_pages(archives.read_deb(file, f"{PREFIX}{region}/text/", ".html"))
            for file, region in zip(files, regions, strict=True)
        )
        pairs = join_pages(*pages)
        if not pairs:
            reason = f"{' and '.join(file.name for file in files)} have no paragraph in common"
            raise absent(["packages of one release"], files[0].parent, reason)
        known = glossary((own, translation) for _, _, own, translation in pairs)
        return self.by_split(
            (
                split_of(file),
                {"id": f"{file}#{paragraph}", first: own.text, second: translation.text}
                | _linked(phrases(own, translation, known)),
            )
            for file, paragraph, own, translation in pairs
        )


def _linked(pairs: Sequence[tuple[Tag, Tag]]) -> dict[str, Any]:
    """Returns the features of the phrases of a pair."""
    spans = [(*own[1:], *other[1:]) for own, other in pairs]
    return {
        "kinds": " ".join(own.kind for own, _ in pairs),
        "phrases": np.array(spans, np.int32).reshape(-1, 4),
    }


def split_of(file: str) -> str:
    """Returns the split of a page, from its path relative to `text/`: 5 % test, 5 % validation."""
    return hashed_split(file, test=5, validation=5)


def read_pages(
    pages: Iterator[tuple[str, bytes]], reader: type["Paragraphs"] | None = None
) -> dict[tuple[str, str], Tagged | None]:
    """Returns each paragraph by (file, paragraph id); None where a page joins variants."""
    found: dict[tuple[str, str], Tagged | None] = {}
    for file, content in sorted(pages):
        page = content.decode("utf-8")
        parser = (reader or Paragraphs)()
        parser.feed(page[max(page.find(BODY), 0) :])
        parser.close()
        for paragraph, tagged in parser.paragraphs:
            found.setdefault((file, paragraph), tagged)
    return found


def join_pages(
    source: Mapping[tuple[str, str], Tagged | None], target: Mapping[tuple[str, str], Tagged | None]
) -> list[tuple[str, str, Tagged, Tagged]]:
    """Returns (file, paragraph id, source, target): each source text once, none left untranslated."""
    seen: set[str] = set()
    pairs = []
    for key, own in source.items():
        other = target.get(key)
        if own and other and own.text != other.text and own.text not in seen:
            seen.add(own.text)
            pairs.append((*key, own, other))
    return pairs


class Paragraphs(HTMLParser):
    """Collects (id, text and tags) of the paragraphs and headings of a help page.

    The pages hold the variants of a wording (Mac or PC keys, Writer or Calc) side by side in one
    `switchinline` span and hide all but one by script. The bare text would run them together
    ("CommandCtrl+C"), so a paragraph with two variants that say something is marked with None.
    """

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[tuple[str, Tagged | None]] = []
        self._begin(None)

    def _begin(self, name: str | None) -> None:
        self._id: str | None = name
        self._text: list[str] = []
        self._joined = False
        self._spans: list[tuple[str, int]] = []  # class and beginning of each that is open
        self._tags: list[Tag] = []  # in characters of the raw text
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
            if self._switches and len(self._spans) == self._switches[-1][0]:
                self._switches[-1][1].append(0)
            kind = dict(attrs).get("class") or ""
            self._spans.append((kind, sum(map(len, self._text))))
            if kind == "switchinline":
                self._switches.append((len(self._spans), []))

    def handle_endtag(self, tag: str) -> None:
        """Ends a paragraph or a span."""
        if tag in _PARAGRAPH_TAGS:
            self._end()
        elif self._id is not None and tag == "span":
            if self._switches and len(self._spans) == self._switches[-1][0]:
                variants = self._switches.pop()[1]
                self._joined |= sum(characters > 0 for characters in variants) > 1
            kind, start = self._spans.pop() if self._spans else ("", 0)
            if kind in KINDS:
                self._tags.append(Tag(kind, start, sum(map(len, self._text))))

    def handle_data(self, data: str) -> None:
        """Adds text to the paragraph and to its variant."""
        if self._id is not None:
            self._text.append(data)
            for _, variants in self._switches:
                if variants:
                    variants[-1] += len(data.strip())

    def _end(self) -> None:
        raw = "".join(self._text)
        text = _tidy(raw)
        if self._id is not None and text:
            tags = [] if self._joined else sorted(self._tags, key=lambda tag: tag[1:])
            placed = tuple(own for tag in tags if (own := _in_text(raw, tag)))
            self.paragraphs.append((self._id, None if self._joined else Tagged(text, placed)))
        self._begin(None)


def _in_text(raw: str, tag: Tag) -> Tag | None:
    """Returns a tag of a raw text in characters of the tidy one; None where there are none in it."""
    inside = raw[tag.start : tag.end]
    first = tag.start + len(inside) - len(inside.lstrip())
    start = len(_tidy(f"{raw[:first]}.")) - 1
    end = len(_tidy(raw[: tag.end]))
    return Tag(tag.kind, start, end) if start < end else None


def _tidy(raw: str) -> str:
    return clean(" ".join(raw.split()))


def clean(text: str) -> str:
    """Returns a text in Unicode NFC without soft hyphens or zero-width spaces."""
    return unicodedata.normalize("NFC", text.replace("\u00ad", "").replace("\u200b", ""))
