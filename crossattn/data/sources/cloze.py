"""Cloze questions on LibreOffice's help: a paragraph without a term, which the text around it has.

Terms are what the pages tag as words of the interface (emph, menuitem, widget), and the same words elsewhere
on the page. The source is a passage, about 200 words before and after a paragraph; the target is the
paragraph with ``___`` in place of a term, then the answer, that term. Names in random order, "enta" to
"entz", take the place of the terms of an example, so that only the passage says which is meant. Each
paragraph is asked once, with blanks around its names; pages are split as in `libreoffice_help`. A passage of
fewer than three terms, of more terms than names, or of many numbers and marks (programs) is left out.

"cloze/made" are passages of made-up sentences, without downloads, whose questions use other words.

Source: Hermann et al. 2015, "Teaching machines to read and comprehend", sections 2.1 and 2.2.
"""

import functools
import itertools
import re
import string
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from crossattn.data import archives, fetch
from crossattn.data.errors import DataError, absent
from crossattn.data.sources import SPLITS, Example, MappedSource, Option
from crossattn.data.sources.libreoffice_help import PREFIX, Paragraphs, read_pages, split_of

FORM = "cloze or cloze/made"
OPTIONS = {
    "repeats": Option(int, "Times that a training question is asked, with other names.", "[1, inf)")
}
NAMES = tuple(f"ent{letter}" for letter in string.ascii_lowercase)
"""What terms are called."""
BLANK = "___"
PASSAGE, QUESTION, TERMS = 200, 40, 3
"""The most words of a passage and a question, and the fewest terms of a passage."""
_CLASSES = ("emph", "menuitem", "widget")
_OPEN, _CLOSE = "\ue000", "\ue001"  # no text has these
_MARKED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")
_LONGEST = 6  # words of a term
_PIECES, _PIECE = 350, re.compile(r"[^\W\d_]+|\d|[^\w\s]")  # the most of a passage
_MADE = 4000

Words = list[str | int]
"""Words, and numbers of terms."""


def open_split(
    rest: str, split: str, *, data_dir: Any = None, repeats: int = 1
) -> Sequence[Example]:
    """Returns examples {"id", "source", "target"}.

    Raises:
      DataError: the name is another one.
    """
    if rest not in ("", "made"):
        raise DataError(f"cloze has no part {rest!r}; expected {FORM}")
    if rest == "made":
        size = _MADE if split == "train" else _MADE // 10
        asked = [_made(split, index) for index in range(size)]
    else:
        asked = [
            each for each in _questions(data_dir) if split_of(each[0].partition("#")[0]) == split
        ]
    times = repeats if split == "train" else 1

    def example(index: int) -> Example:
        again, row = divmod(index, len(asked))
        name, passage, question, answer = asked[row]
        random = np.random.default_rng(zlib.crc32(f"{name} {again}".encode()))
        names = [NAMES[i] for i in random.permutation(len(NAMES))]
        numbers = {term: i for i, term in enumerate(dict.fromkeys(_terms(passage + question)))}

        def text(words: Words) -> str:
            return " ".join(x if isinstance(x, str) else names[numbers[x]] for x in words)

        target = text([BLANK if x == answer else x for x in question] + [answer])
        return {
            "id": name if not again else f"{name}~{again}",
            "source": text(passage),
            "target": target,
        }

    return MappedSource(range(len(asked) * times), example)


def _terms(words: Words) -> list[int]:
    return [word for word in words if isinstance(word, int)]


@functools.lru_cache(maxsize=1)
def _questions(data_dir: Any) -> list[tuple[str, Words, Words, int]]:
    (package,) = fetch.debian_packages(["libreoffice-help-en-us"], data_dir)
    pages = archives.read_deb(package, f"{PREFIX}en-US/text/", ".html")
    texts = read_pages(pages, MarkedParagraphs)
    found, seen = [], set()
    for file, own in itertools.groupby(texts.items(), key=lambda item: item[0][0]):
        page = {key[1]: tagged.text for key, tagged in own if tagged}
        for paragraph, *asked in questions_of(file, page):
            words = _MARKED.sub(r"\1", page[paragraph])
            if words not in seen:
                seen.add(words)
                found.append((f"{file}#{paragraph}", *asked))
    if not found:
        raise absent([f"{package.name}"], package.parent, f"{package.name} has no pages with terms")
    return found


def questions_of(file: str, page: dict[str, str]) -> Iterator[tuple[str, Words, Words, int]]:
    """Yields (paragraph, passage, question, answer) of each paragraph that can be asked about.

    Args:
      file: the page's name, of which the choice of terms depends.
      page: marked texts of its paragraphs, by their names.
    """
    terms = sorted(
        {t for text in page.values() for t in _MARKED.findall(text) if _is_term(t)}, key=len
    )
    known = {term: number for number, term in enumerate(reversed(terms))}  # the longest first
    if len(known) < TERMS:
        return
    anywhere = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, known))})(?!\w)")
    words = {name: _words(text, known, anywhere) for name, text in page.items()}
    names = list(words)
    for place, name in enumerate(names):
        own = words[name]
        before = [word for other in names[:place] for word in words[other]][-PASSAGE // 2 :]
        after = [word for other in names[place + 1 :] for word in words[other]][: PASSAGE // 2]
        passage = before + after
        may = [term for term in dict.fromkeys(_terms(own)) if term in passage]
        if not may or _unfit(passage, own):
            continue
        answer = may[zlib.crc32(f"{file}#{name}".encode()) % len(may)]
        first = max(0, own.index(answer) - QUESTION // 2)
        question = own[first : first + QUESTION]
        if any(word != answer for word in question):
            yield name, passage, question, answer


def _unfit(passage: Words, question: Words) -> bool:
    """Returns whether a passage has too few terms, too many, or more than a model is to read."""
    many = len({*_terms(passage + question)}) > len(NAMES)
    text = " ".join(word if isinstance(word, str) else "x" for word in passage)
    return many or len({*_terms(passage)}) < TERMS or len(_PIECE.findall(text)) > _PIECES


def _is_term(text: str) -> bool:
    return text[:1].isupper() and len(text) > 1 and len(text.split()) <= _LONGEST


def _words(text: str, known: dict[str, int], anywhere: re.Pattern) -> Words:
    """Returns the words of a marked text and the numbers of its terms, each of which stands alone."""
    found: Words = []
    for part in re.split(f"({_MARKED.pattern.replace('(', '(?:')})", text):
        marked = _MARKED.fullmatch(part)
        if marked and marked[1] in known:
            found.append(known[marked[1]])
            continue
        for piece in anywhere.split(part.replace(_OPEN, "").replace(_CLOSE, "")):
            found.extend([known[piece]] if piece in known else piece.split())
    # A text that has a blank or a name itself would be misread.
    return [word for word in found if word not in (BLANK, *NAMES)]


class MarkedParagraphs(Paragraphs):
    """Paragraphs with marks around their terms."""

    def _begin(self, name: str | None) -> None:
        super()._begin(name)
        self._marks: list[bool] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Also opens a mark where a span is of a marked class."""
        super().handle_starttag(tag, attrs)
        if tag == "span" and self._id is not None:
            self._marks.append(dict(attrs).get("class") in _CLASSES)
            self._text.extend([_OPEN] * self._marks[-1])

    def handle_endtag(self, tag: str) -> None:
        """Also closes the mark of a span."""
        if tag == "span" and self._id is not None and self._marks and self._marks.pop():
            self._text.append(_CLOSE)
        super().handle_endtag(tag)


_COLOURS = ("red", "green", "blue", "white", "black", "yellow")
_ASKED = ("scarlet", "olive", "azure", "pale", "dark", "golden")  # what questions call them


def _made(split: str, index: int) -> tuple[str, Words, Words, int]:
    """Returns a question of a made-up passage, in which each term has a colour, and two stand alone too."""
    random = np.random.default_rng([SPLITS.index(split), index])
    colours = random.permutation(len(_COLOURS))[: random.integers(3, 6)]
    sentences: list[Words] = [[term, _COLOURS[c], "."] for term, c in enumerate(colours)]
    sentences += [[int(random.integers(len(colours))), "."] for _ in range(2)]
    passage = [word for i in random.permutation(len(sentences)) for word in sentences[i]]
    answer = int(random.integers(len(colours)))
    return f"{split}-{index}", passage, [answer, _ASKED[colours[answer]]], answer
