"""A grammar of small English sentences, realised in German, Hindi, Japanese and Spanish with word links.

A ``Clause`` is a meaning. Each language realises it as words, and every word has the concepts that it stands
for; two words are linked if they share a concept. A word without a concept stays unlinked: articles of a
language whose partner has none, case particles (ने, को, は, が, を), the Spanish personal "a", a doubled
"le", the comma before "dass".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Word = tuple[str, tuple[str, ...]]
"""A word and its concepts, such as ("gato", ("subject.noun",))."""


@dataclass(frozen=True)
class NounPhrase:
    """Noun phrase.

    Attributes:
        noun: English singular.
        determiner: of the singular; plurals are "the", "two" (of "a"), "these" and "my".
        adjective: in English, or None.
        plural: whether there are several.
    """

    noun: str
    determiner: Literal["the", "a", "this", "my"] = "the"
    adjective: str | None = None
    plural: bool = False


@dataclass(frozen=True)
class Clause:
    """Meaning of a sentence.

    Attributes:
        kind: "phrase" (the subject alone), "past" (the cat sat), "present" (sees the dog), "perfect" (has
            seen the dog), "like" (likes ice cream), "is" (is old), "are" (are friends).
        subject: a noun phrase, or an English pronoun.
        verb: English infinitive, of "past", "present" and "perfect".
        object: of "present" and "perfect".
        place: preposition and noun phrase, of "past".
        adverb: "yesterday" or "today", which stands first.
        predicate: food of "like", adjective of "is", noun of "are".
        knower: pronoun of "I know that ...", around "present".
    """

    kind: Literal["phrase", "past", "present", "perfect", "like", "is", "are"]
    subject: NounPhrase | str
    verb: str = ""
    object: NounPhrase | None = None
    place: tuple[str, NounPhrase] | None = None
    adverb: str | None = None
    predicate: str = ""
    knower: str | None = None


PRONOUNS = ("I", "you", "he", "she", "we", "they")
ANIMALS = ("cat", "dog", "bird", "horse")
HUMANS = ("man", "woman", "child", "girl", "friend", "teacher")
THINGS = ("house", "car", "book", "star", "tree", "school")
PLACES = ("mat", "chair", "table", "bench")
FOODS = ("ice cream", "bread", "fruit", "rice", "cheese", "fish", "meat", "cake")


def person(subject: NounPhrase | str) -> int:
    """Returns the place in a paradigm of five: I, you, singular, we, plural."""
    if isinstance(subject, NounPhrase):
        return 4 if subject.plural else 2
    return (0, 1, 2, 2, 3, 4)[PRONOUNS.index(subject)]


def concepts(role: str, *parts: str) -> tuple[str, ...]:
    """Returns the concepts of a word of a role: ("subject.noun",)."""
    return tuple(f"{role}.{part}" for part in parts)


def tagged(text: str, *tags: str) -> list[Word]:
    """Returns the words of a text, between spaces, each of which stands for the same concepts."""
    return [(word, tags) for word in text.split()]


def links(source: list[Word], target: list[Word]) -> list[tuple[int, int]]:
    """Returns the pairs of numbers of words that share a concept, in order."""

    def pairs() -> Iterator[tuple[int, int]]:
        for i, (_, own) in enumerate(source):
            yield from ((i, j) for j, (_, other) in enumerate(target) if set(own) & set(other))

    return list(pairs())
