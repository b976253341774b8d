"""Markup carried to a translation: taken off the source, and put where attention says that its words went.

``read`` splits HTML into a text and its elements; ``place`` finds the characters of each element in the
translation; ``write`` makes HTML of it again. Elements keep their nesting and none is lost: those without
words (a line break, a picture) stand between the words that their neighbours became.

    <b>Open</b> the <i>File</i> menu          mutual[t, s] = w[t, s] / sum_s w[t, s] * w[t, s] / sum_t w[t, s]
    Ouvrez le menu Fichier                    mass of e at t = share of mutual[t] that is in the words of e
    <b>Ouvrez</b> le menu <i>Fichier</i>      e goes to the run of words t with the greatest sum of mass - 1/2

A target word and a source word count for each other by the share of the one's attention that the other gets,
and the share of what the other gets that comes from the one, as posteriors of two directions are multiplied
in Liang, Taskar and Klein 2006, "Alignment by agreement". All of it is text and numpy arrays.
"""

import html
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from crossattn.types import Float, Int

Span = tuple[int, int]

_TAG = re.compile(
    r"""<!--.*?-->|<[!?][^>]*>|<(?P<end>/?)(?P<name>[a-zA-Z][^\s/>]*)
    (?>=\s*[^\s"'>][^\s>]*|"[^"]*"|'[^']*'|/(?!>)|[^'"/>])*+(?P<alone>/?)>""",
    re.DOTALL | re.VERBOSE,
)
_CUT = re.compile(r"</?[a-zA-Z]|<!--")
_VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr",
}  # fmt: skip
_LITERAL = ("script", "style")
_WITHOUT_BLANKS = {"CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR"}
_BREAKS = ("br", "hr")  # which part words


class MarkupError(ValueError):
    """Markup that is not closed, or closed in another order, in one sentence."""


@dataclass(frozen=True)
class Element:
    """An element of a text.

    Attributes:
      opening, closing: what is written before and after its content, attributes as they were.
      start, end: characters of its content in the text without markup, [start, end).
      parent: number of the element that it is in; -1 is none.
    """

    opening: str
    closing: str
    start: int
    end: int
    parent: int


@dataclass(frozen=True)
class Marked:
    """A text without markup, and its elements in the order in which they open."""

    text: str
    elements: tuple[Element, ...]


def read(source: str) -> Marked:
    """Splits HTML into its text, entities resolved, and its elements; comments are elements too.

    Raises:
      MarkupError: an element is not closed, or elements overlap.
    """
    text, found = "", []
    open_: list[tuple[str, int, int]] = []  # name, number, place in the source
    at = 0
    while tag := _TAG.search(source, at):
        text += _plain(source, at, tag.start())
        at, name = tag.end(), (tag["name"] or "").lower()
        parent = open_[-1][1] if open_ else -1
        if tag["end"]:
            if not open_ or open_[-1][0] != name:
                last = f"expected </{open_[-1][0]}>" if open_ else "nothing is open"
                raise MarkupError(
                    f"{tag[0]} at character {tag.start() + 1} closes no <{name}>: {last}."
                )
            _, number, _ = open_.pop()
            was = found[number]
            found[number] = Element(was.opening, tag[0], was.start, len(text), was.parent)
            continue
        opening = tag[0]
        if name in _LITERAL:  # no words to translate
            end = re.compile(f"</{name}\\s*>", re.IGNORECASE).search(source, at)
            if end is None:
                raise _unclosed(opening, name, tag.start())
            opening, at = source[tag.start() : end.end()], end.end()
        elif name and name not in _VOID and not tag["alone"]:
            open_.append((name, len(found), tag.start()))
        if name in _BREAKS and not text[-1:].isspace():
            text += " "
        found.append(Element(opening, "", len(text), len(text), parent))
    text += _plain(source, at, len(source))
    if open_:
        name, number, place = open_[-1]
        raise _unclosed(found[number].opening, name, place)
    return Marked(text, tuple(found))


def _plain(source: str, start: int, end: int) -> str:
    piece = source[start:end]
    if cut := _CUT.search(piece):
        raise MarkupError(
            f"{piece[cut.start() :][:20]!r} at character {start + cut.start() + 1} begins a tag that does"
            " not end; expected > after it, or &lt; for the character itself."
        )
    return html.unescape(piece)


def _unclosed(opening: str, name: str, place: int) -> MarkupError:
    return MarkupError(
        f"{opening} at character {place + 1} is not closed; expected </{name}> after it."
    )


def place(
    marked: Marked,
    translation: str,
    weights: Float[np.ndarray, "T S"],
    source_spans: Int[np.ndarray, "S 2"],
    target_spans: Int[np.ndarray, "T 2"],
) -> list[Span]:
    """Returns the characters [start, end) of each element in the translation.

    An element gets the run of words, free of its siblings and inside its parent, with the greatest sum of
    mass less one half; at least one word, while there are any. Siblings choose in the order of that sum.
    Punctuation at an end stays outside unless the source has some there. An element around a part of a word
    goes around a whole one; scripts without blanks are placed by tokens.

    Args:
      weights: attention of each target token to each source token, of any scale.
      source_spans, target_spans: characters of each token in its text; (a, a) for one without characters,
        such as the end, which is left out.
    """
    placing = _Placing(marked, translation, weights, source_spans, target_spans)
    placing.place(-1, (0, len(placing.units)), 0)
    return [placing.found[i] for i in range(len(marked.elements))]


class _Placing:
    """The units of a translation, which are words, or tokens of scripts without blanks, and their attention.

    Attributes:
      units: characters of each.
      masses: shares of each unit's mutual attention that the tokens of the source get which have characters,
        [units S].
      found: characters of each element that has a place.
    """

    def __init__(self, marked, translation, weights, source_spans, target_spans):
        self.marked, self.translation = marked, translation
        real = source_spans[:, 1] > source_spans[:, 0]
        self.source = source_spans[real]
        masses = _mutual(np.asarray(weights, np.float64)[:, real])
        self.units: list[Span] = []
        rows: list[list[int]] = []
        for row, (start, end) in enumerate(np.asarray(target_spans).tolist()):
            if start < end and self._continues(start):
                self.units[-1] = (self.units[-1][0], max(end, self.units[-1][1]))
                rows[-1].append(row)
            elif start < end:
                self.units.append((start, end))
                rows.append([row])
        shape = len(rows), len(self.source)
        masses = np.array([masses[own].mean(0) for own in rows]).reshape(shape)
        self.masses = _shares(_mutual(masses), 1)
        self.wordlike = [any(map(str.isalnum, translation[a:b])) for a, b in self.units]
        self.found: dict[int, Span] = {}

    def _continues(self, start: int) -> bool:
        """Returns whether a token that starts there is a part of the last unit."""
        end = self.units[-1][1] if self.units else -1
        around = self.translation[start - 1 : start + 1]
        word = all(unicodedata.category(c)[0] in "LMN" for c in around)
        spaced = not any(unicodedata.name(c, "").split(" ")[0] in _WITHOUT_BLANKS for c in around)
        return start < end or (start == end and word and spaced)

    def place(self, parent: int, within: Span, at: int) -> None:
        """Places the children of an element, and theirs.

        Args:
          parent: the element; -1 is the whole text.
          within: its units.
          at: the character where it is, if it has no units.
        """
        children = [i for i, e in enumerate(self.marked.elements) if e.parent == parent]
        waiting = [i for i in children if self._content(i) and len(self._tokens(i))]
        free = np.zeros(len(self.units), bool)
        free[slice(*within)] = True
        taken: dict[int, Span] = {}
        while waiting and free.any():
            runs = {i: _best_run(self._gains(i), free) for i in waiting}
            best = max(waiting, key=lambda i: runs[i][0])
            start, end = taken[best] = self._trimmed(best, *runs[best][1:])
            free[start:end] = False
            waiting.remove(best)
        for i in children:
            if i in taken:
                start, end = taken[i]
                self.found[i] = self.units[start][0], self.units[end - 1][1]
                self.place(i, taken[i], self.found[i][0])
            else:
                own = self._between(i, within, list(taken.values()))
                where = at
                if within[0] < within[1]:
                    where = self.units[own][0] if own < within[1] else self.units[own - 1][1]
                self.found[i] = where, where
                self.place(i, (own, own), where)

    def _content(self, number: int) -> str:
        """Returns the words of an element."""
        element = self.marked.elements[number]
        return self.marked.text[element.start : element.end].strip()

    def _tokens(self, number: int) -> np.ndarray:
        """Returns the numbers of the source tokens that an element has."""
        if number < 0:
            return np.arange(len(self.source))
        element = self.marked.elements[number]
        return np.flatnonzero(
            (self.source[:, 0] < element.end) & (self.source[:, 1] > element.start)
        )

    def _gains(self, number: int) -> np.ndarray:
        return self.masses[:, self._tokens(number)].sum(1) - 0.5

    def _trimmed(self, number: int, start: int, end: int) -> Span:
        """Returns a run of units without punctuation at an end where the source has none."""
        content = self._content(number)
        if any(self.wordlike[start:end]):
            while content[0].isalnum() and not self.wordlike[start]:
                start += 1
            while content[-1].isalnum() and not self.wordlike[end - 1]:
                end -= 1
        return start, end

    def _between(self, number: int, within: Span, taken: Sequence[Span]) -> int:
        """Returns the unit before which an element without words stands, outside its siblings."""
        element, first, last = self.marked.elements[number], *within
        own = self._tokens(element.parent)
        before = [s for s in own if self.source[s, 1] <= element.start]
        after = [s for s in own if self.source[s, 0] >= element.start]
        if not before or not after:
            return last if before else first

        def read_around(at: int) -> float:
            left = self.masses[at - 1, before[-1]] if at > first else 0.0
            return float(left + (self.masses[at, after[0]] if at < last else 0.0))

        outside = [at for at in range(first, last + 1) if not any(a < at < b for a, b in taken)]
        return max(outside, key=read_around)


def _shares(weights: np.ndarray, axis: int) -> np.ndarray:
    return weights / np.maximum(weights.sum(axis, keepdims=True), 1e-30)


def _mutual(weights: np.ndarray) -> np.ndarray:
    return _shares(weights, 1) * _shares(weights, 0)


def _best_run(gains: np.ndarray, free: np.ndarray) -> tuple[float, int, int]:
    """Returns the greatest sum of a run of free units, and the run. Source: Bentley 1984 (Kadane)."""
    best, total, start = (-np.inf, 0, 0), 0.0, 0
    for at, gain in enumerate(gains.tolist()):
        if not free[at]:
            total, start = 0.0, at + 1
            continue
        if total < 0:
            total, start = 0.0, at
        total += gain
        if total > best[0]:
            best = (total, start, at + 1)
    return best


def write(marked: Marked, translation: str, spans: Sequence[Span]) -> str:
    """Returns the HTML of a translation whose elements have these characters, as ``place`` finds them."""
    return "".join(_written(marked, translation, spans, -1, (0, len(translation))))


def _written(marked, translation, spans, parent: int, within: Span) -> Iterator[str]:
    children = [i for i, e in enumerate(marked.elements) if e.parent == parent]
    at = within[0]
    for i in sorted(children, key=lambda i: (*spans[i], i)):
        start, end = spans[i]
        yield html.escape(translation[at:start], quote=False)
        yield marked.elements[i].opening
        yield from _written(marked, translation, spans, i, (start, end))
        yield marked.elements[i].closing
        at = end
    yield html.escape(translation[at : within[1]], quote=False)
