"""Sentences of the grammar: those of the literature, and others drawn by a hash of their number."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from crossattn.data.grammar import (
    ANIMALS,
    FOODS,
    HUMANS,
    PLACES,
    PRONOUNS,
    THINGS,
    Clause,
    NounPhrase,
    Word,
    english,
    german,
    hindi,
    japanese,
    spanish,
)

Value = TypeVar("Value")
LANGUAGES: dict[str, Callable[[Clause], list[Word]]] = {
    "de": german.sentence,
    "es": spanish.sentence,
    "hi": hindi.sentence,
    "ja": japanese.sentence,
}
_CAT = NounPhrase("cat")
LITERATURE = (
    Clause("past", _CAT, "sit", place=("on", NounPhrase("mat"))),
    Clause("phrase", NounPhrase("cat", adjective="black")),
    Clause("past", _CAT, "sit"),
    Clause("like", "I", predicate="ice cream"),
    Clause("are", "we", predicate="friend"),
)
"""The cat sat on the mat, the black cat, the cat sat, I like ice cream, we are friends."""

_KINDS = (
    *("phrase",) * 2,
    *("past",) * 4,
    *("present",) * 4,
    *("perfect",) * 4,
    *("like",) * 3,
    *("is",) * 2,
    "are",
)
_OF_ALL = ("small", "big", "beautiful")
_OF_HUMANS = (*_OF_ALL, "happy", "kind")
_OF_ANIMALS = (*_OF_ALL, "black", "white", "happy")
_OF_THINGS = (*_OF_ALL, "black", "white", "red", "green", "old", "new")


def sentences(language: str, count: int) -> Iterator[tuple[list[Word], list[Word], bool]]:
    """Yields pairs of English and another language, each English sentence once.

    The sentences of the literature come first, and their translations come once too.

    Args:
        language: a key of ``LANGUAGES``.
        count: the number of pairs.

    Yields:
        English words, the other's words, and whether the pair is of the literature.
    """
    realise = LANGUAGES[language]
    known = [(english.sentence(clause), realise(clause)) for clause in LITERATURE]
    yield from ((*pair, True) for pair in known[:count])
    seen = {_text(pair[0]) for pair in known}
    translations = {_text(pair[1]) for pair in known}
    number = 0
    while len(seen) < count:
        clause = drawn(number)
        number += 1
        source, target = english.sentence(clause), realise(clause)
        if _text(source) not in seen and _text(target) not in translations:
            seen.add(_text(source))
            yield source, target, False


def _text(words: list[Word]) -> str:
    return " ".join(text for text, _ in words)


class _Choices:
    """Choices by the digits of a hash, which are the same everywhere."""

    def __init__(self, number: int):
        self._digits = int.from_bytes(hashlib.sha256(f"phrases {number}".encode()).digest(), "big")

    def of(self, values: tuple[Value, ...]) -> Value:
        self._digits, at = divmod(self._digits, len(values))
        return values[at]

    def one_in(self, count: int) -> bool:
        return self.of(tuple(range(count))) == 0


def drawn(number: int) -> Clause:
    """Returns the clause of a number, from 0; two numbers may have the same."""
    choose = _Choices(number)
    kind: Any = choose.of(_KINDS)
    if kind == "phrase":
        return Clause(kind, _phrase(choose, ANIMALS + HUMANS + THINGS + PLACES))
    if kind == "are":
        return _are(choose)
    if kind == "is":
        return _is(choose)
    subject = _who(choose)
    if kind == "like":
        return Clause(kind, subject, predicate=choose.of(FOODS))
    adverb = choose.of((None, None, None, "today", "yesterday"))
    if kind == "past":
        verb, place = choose.of(("sit", "sit", "sleep", "sleep", "run", "come")), None
        if verb in ("sit", "sleep") and not choose.one_in(4):
            place = choose.of(("on", "on", "under")), _phrase(choose, PLACES)
        return Clause(kind, subject, verb, place=place, adverb=adverb)
    verb = choose.of(("see", "call", "look for", "push", "wash"))
    others = ANIMALS + HUMANS if verb == "call" else ANIMALS + HUMANS + THINGS + PLACES
    clause = Clause(kind, subject, verb, _phrase(choose, others))
    if kind == "present" and choose.one_in(3):
        return replace(clause, knower=choose.of(PRONOUNS))
    return replace(clause, adverb="today" if adverb else None)


def _who(choose: _Choices) -> NounPhrase | str:
    return choose.of(PRONOUNS) if choose.one_in(3) else _phrase(choose, ANIMALS + HUMANS)


def _are(choose: _Choices) -> Clause:
    """Returns a clause whose subject is masculine in every language, and so is its predicate."""
    nouns = ("friend", "teacher", "child")
    predicate = choose.of(nouns)
    others = tuple(noun for noun in ("man", *nouns) if noun != predicate)
    subject = choose.of(("we", "they", _phrase(choose, others, plural=True)))
    return Clause("are", subject, predicate=predicate)


def _is(choose: _Choices) -> Clause:
    kind = choose.of((ANIMALS, HUMANS, THINGS + PLACES, PRONOUNS))
    if kind is PRONOUNS:
        return Clause("is", choose.of(PRONOUNS), predicate=choose.of(_OF_HUMANS))
    noun = choose.of(kind)
    determiner: Any = choose.of(("the", "the", "this", "my"))
    subject = NounPhrase(noun, determiner, plural=choose.one_in(2))
    return Clause("is", subject, predicate=choose.of(_adjectives(noun)))


def _phrase(choose: _Choices, nouns: tuple[str, ...], plural: bool | None = None) -> NounPhrase:
    noun = choose.of(nouns)
    determiner: Any = choose.of(("the", "the", "a", "this", "my"))
    adjective = choose.of(_adjectives(noun)) if choose.one_in(2) else None
    return NounPhrase(noun, determiner, adjective, choose.one_in(3) if plural is None else plural)


def _adjectives(noun: str) -> tuple[str, ...]:
    if noun in HUMANS:
        return _OF_HUMANS
    return _OF_ANIMALS if noun in ANIMALS else _OF_THINGS
