"""Phrases that translators tagged alike on both sides of a pair: gold links of phrases, not of words.

A tag is an inline element of a kind (a key, a menu, a term that is emphasised) around characters of a text.
``phrases`` links the tags of a pair, by kind and content; a pair that leaves a choice has none.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

KINDS = ("emph", "menuitem", "widget", "keycode", "input", "literal")
"""Classes of the help's inline tags: terms, menus, buttons, keys, what is typed, words of programs."""

Glossary = Mapping[tuple[str, str], set[str]]
"""The contents of target tags by (kind, content) of a source tag."""


class Tag(NamedTuple):
    """An inline element: its kind and the characters [start, end) of the text inside it."""

    kind: str
    start: int
    end: int


class Tagged(NamedTuple):
    """A text and its tags, in the order of their beginnings."""

    text: str
    tags: tuple[Tag, ...] = ()

    def content(self, tag: Tag) -> str:
        """Returns the text inside a tag, without case."""
        return self.text[tag.start : tag.end].casefold()


def glossary(pairs: Iterable[tuple[Tagged, Tagged]]) -> Glossary:
    """Returns what stands in the target tag of pairs that have one tag of a kind on each side."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for source, target in pairs:
        once = _once(tag.kind for tag in source.tags), _once(tag.kind for tag in target.tags)
        for own in source.tags:
            if own.kind in once[0] & once[1]:
                (other,) = (tag for tag in target.tags if tag.kind == own.kind)
                found[own.kind, source.content(own)].add(target.content(other))
    return found


def phrases(source: Tagged, target: Tagged, known: Glossary) -> list[tuple[Tag, Tag]]:
    """Returns the tags of a pair that stand for each other, or none if that is not certain.

    Both sides need as many tags of each kind. Within a kind, tags are linked that have the same content, then
    those whose contents the glossary has as translations, in each case where there is one candidate on either
    side; then the last one of each side. A kind with tags left over leaves a choice, and the pair out. Tags
    around the whole text of both sides say nothing and are no phrases.
    """
    kinds = Counter(tag.kind for tag in source.tags)
    if kinds != Counter(tag.kind for tag in target.tags):
        return []
    found: list[tuple[Tag, Tag]] = []
    for kind in kinds:
        own = [tag for tag in source.tags if tag.kind == kind]
        other = [tag for tag in target.tags if tag.kind == kind]

        def same(s: Tag, t: Tag) -> bool:
            return source.content(s) == target.content(t)

        def translated(s: Tag, t: Tag) -> bool:
            return target.content(t) in known.get((s.kind, source.content(s)), ())

        for alike in (same, translated):
            new = _certain(own, other, alike)
            found += new
            own = [tag for tag in own if tag not in {s for s, _ in new}]
            other = [tag for tag in other if tag not in {t for _, t in new}]
        if len(own) > 1:
            return []
        found += zip(own, other, strict=True)
    whole = [(0, len(source.text)), (0, len(target.text))]
    inner = [(s, t) for s, t in found if [s[1:], t[1:]] != whole]
    return sorted(inner, key=lambda pair: pair[0][1:])


def _certain(own: Sequence[Tag], other: Sequence[Tag], alike) -> list[tuple[Tag, Tag]]:
    """Returns the pairs that are alike, where neither has another that it is alike to."""
    pairs = [(s, t) for s in own for t in other if alike(s, t)]
    once = _once(s for s, _ in pairs), _once(t for _, t in pairs)
    return [(s, t) for s, t in pairs if s in once[0] and t in once[1]]


def _once(values: Iterable) -> set:
    return {value for value, count in Counter(values).items() if count == 1}
