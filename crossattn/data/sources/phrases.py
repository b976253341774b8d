"""Small grammars with gold word links: real agreement, real crossings, no files.

English with German, Spanish, Hindi or Japanese is by `crossattn.data.grammar`. Its test split has the
sentences of the literature, "the cat sat on the mat" and the like, which no other split has; a split is that
of the English sentence, whatever the other language. Japanese is written with spaces between words.

English with French is a grammar of its own, whose "the black cat" is in the training split. "the black cat
sees a small bird" is "le chat noir voit un petit oiseau": most adjectives follow their noun, so links cross;
a few stand before it; articles, adjectives and verbs agree in gender and number; "l'", "cet" and "mon" come
before vowels.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from crossattn.data.errors import DataError
from crossattn.data.grammar import drawing, links
from crossattn.data.sources import Example, MappedSource, hashed_split, reversed_example

LANGUAGES = ("fr", *drawing.LANGUAGES)
FORM = f"phrases/en-fr or phrases/fr-en, or with {', '.join(drawing.LANGUAGES)} for fr"
NUM_PAIRS = 4000
_NUM_BARE = 480  # pairs that are a noun phrase alone
_VOWELS = "aeiouéêhà"  # every h of this vocabulary is mute


@dataclass(frozen=True)
class _Noun:
    english: tuple[str, str]  # singular, plural
    french: tuple[str, str]
    feminine: bool = False


@dataclass(frozen=True)
class _Adjective:
    english: str
    french: tuple[str, str, str, str]  # masculine, feminine, their plurals
    before_noun: bool = False
    before_vowel: str = ""  # the masculine singular before a vowel, where it differs


_NOUNS = (
    _Noun(("cat", "cats"), ("chat", "chats")),
    _Noun(("dog", "dogs"), ("chien", "chiens")),
    _Noun(("bird", "birds"), ("oiseau", "oiseaux")),
    _Noun(("man", "men"), ("homme", "hommes")),
    _Noun(("child", "children"), ("enfant", "enfants")),
    _Noun(("horse", "horses"), ("cheval", "chevaux")),
    _Noun(("house", "houses"), ("maison", "maisons"), feminine=True),
    _Noun(("car", "cars"), ("voiture", "voitures"), feminine=True),
    _Noun(("woman", "women"), ("femme", "femmes"), feminine=True),
    _Noun(("girl", "girls"), ("fille", "filles"), feminine=True),
    _Noun(("star", "stars"), ("étoile", "étoiles"), feminine=True),
    _Noun(("school", "schools"), ("école", "écoles"), feminine=True),
)
_ADJECTIVES = (
    None,
    _Adjective("black", ("noir", "noire", "noirs", "noires")),
    _Adjective("white", ("blanc", "blanche", "blancs", "blanches")),
    _Adjective("green", ("vert", "verte", "verts", "vertes")),
    _Adjective("red", ("rouge", "rouge", "rouges", "rouges")),
    _Adjective("happy", ("heureux", "heureuse", "heureux", "heureuses")),
    _Adjective("strange", ("étrange", "étrange", "étranges", "étranges")),
    _Adjective("small", ("petit", "petite", "petits", "petites"), before_noun=True),
    _Adjective("tall", ("grand", "grande", "grands", "grandes"), before_noun=True),
    _Adjective("old", ("vieux", "vieille", "vieux", "vieilles"), True, "vieil"),
    _Adjective("beautiful", ("beau", "belle", "beaux", "belles"), True, "bel"),
)
# English singular and plural; French masculine, feminine, plural, and before a vowel masculine,
# feminine.
_DETERMINERS = (
    (("the", "the"), ("le", "la", "les", "l'", "l'")),
    (("a", "two"), ("un", "une", "deux", "un", "une")),
    (("this", "these"), ("ce", "cette", "ces", "cet", "cette")),
    (("my", "my"), ("mon", "ma", "mes", "mon", "mon")),
)
_VERBS = (
    (("sees", "see"), ("voit", "voient")),
    (("likes", "like"), ("aime", "aiment")),
    (("follows", "follow"), ("suit", "suivent")),
    (("finds", "find"), ("trouve", "trouvent")),
    (("watches", "watch"), ("regarde", "regardent")),
    (("knows", "know"), ("connaît", "connaissent")),
)
_RADICES = (len(_NOUNS), len(_ADJECTIVES), len(_DETERMINERS), 2)
_NUM_NOUN_PHRASES = int(np.prod(_RADICES))

_Words = tuple[list[str], list[str], list[tuple[int, int]]]  # English, French, links


def open_split(direction: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns the examples of a split, always the same: of 4,000 pairs a tenth test, a tenth validation."""
    first, _, second = (direction or "en-fr").partition("-")
    language = first if second == "en" else second
    if "en" not in (first, second) or language not in LANGUAGES:
        pairs = ", ".join(f"en-{language}" for language in LANGUAGES)
        raise DataError(
            f"phrases has no direction {direction!r}; expected {pairs}, or one of them turned round"
        )
    if language == "fr":
        own = (index for index in range(NUM_PAIRS) if _split_of(index) == split)
        pairs = [_example(index, *_sentence(index)) for index in own]
    else:
        pairs = _apart(_pairs(language, NUM_PAIRS), split)
    return MappedSource(pairs, reversed_example) if second == "en" else pairs


@cache
def _pairs(language: str, count: int) -> list[tuple[str, Example]]:
    """Returns the pairs of English and a language of ``drawing``, each with its split."""
    found = []
    drawn = drawing.sentences(language, count)
    for index, (english, other, is_literature) in enumerate(drawn):
        source, target = ([text for text, _ in words] for words in (english, other))
        pair = _example(index, source, target, links(english, other))
        split = hashed_split(f"phrases {pair['source']}", test=10, validation=10)
        found.append(("test" if is_literature else split, pair))
    return found


def _apart(pairs: Sequence[tuple[str, Example]], split: str) -> list[Example]:
    """Returns the pairs of a split whose target stands in no split that is scored after it.

    "the black cat" and "a black cat" are one noun phrase in Japanese.
    """
    order = ("train", "validation", "test")
    later = order[order.index(split) + 1 :]
    known = {pair["target"] for own, pair in pairs if own in later}
    return [pair for own, pair in pairs if own == split and pair["target"] not in known]


def _example(
    index: int, source: Sequence[str], target: Sequence[str], links: Iterable[tuple[int, int]]
) -> Example:
    """Returns an example of the words of both sides and their links."""
    (source_text, source_spans), (target_text, target_spans) = _join(source), _join(target)
    return {
        "id": str(index),
        "source": source_text,
        "target": target_text,
        "source_spans": source_spans,
        "target_spans": target_spans,
        "links": np.array(sorted(links), np.int32).reshape(-1, 2),
    }


def _split_of(index: int) -> str:
    # A hash, since the strides below would give a split by remainder only some of the nouns.
    digest = hashlib.md5(str(index).encode(), usedforsecurity=False).digest()
    return {0: "test", 1: "validation"}.get(digest[0] % 10, "train")


def _sentence(index: int) -> _Words:
    """Returns pair number `index`, 0 "the black cat"; strides prime to the counts keep pairs distinct."""
    if index < _NUM_BARE:
        return _noun_phrase((12 + index * 131) % _NUM_NOUN_PHRASES)[0]
    total = _NUM_NOUN_PHRASES**2 * len(_VERBS)
    rest, verb = divmod(index * 1_299_709 % total, len(_VERBS))
    subject_index, object_index = divmod(rest, _NUM_NOUN_PHRASES)
    subject, plural = _noun_phrase(subject_index)
    english, french = _VERBS[verb]
    middle = ([english[plural]], [french[plural]], [(0, 0)])
    return _append(_append(subject, middle), _noun_phrase(object_index)[0])


def _noun_phrase(index: int) -> tuple[_Words, int]:
    """Returns (words and links, 1 if plural) of one noun phrase, by its number in mixed radix."""
    index, noun_index = divmod(index, _RADICES[0])
    index, adjective_index = divmod(index, _RADICES[1])
    plural, determiner_index = divmod(index, _RADICES[2])
    noun, adjective = _NOUNS[noun_index], _ADJECTIVES[adjective_index]
    determiner = _DETERMINERS[determiner_index]
    french_noun = noun.french[plural]
    before: list[tuple[str, int]] = []  # French words with the English word they translate
    after: list[tuple[str, int]] = []
    english = [determiner[0][plural], noun.english[plural]]
    if adjective is not None:
        english.insert(1, adjective.english)
        form = adjective.french[2 * plural + noun.feminine]
        elides = adjective.before_noun and not plural and not noun.feminine
        if elides and adjective.before_vowel and french_noun[0] in _VOWELS:
            form = adjective.before_vowel
        (before if adjective.before_noun else after).append((form, 1))
    words = [*before, (french_noun, len(english) - 1), *after]
    article = _article(determiner[1], noun.feminine, plural, words[0][0])
    if english[0] == "a" and english[1][0] in "aeiou":
        english[0] = "an"
    french = [(article, 0), *words]
    links = [(source, place) for place, (_, source) in enumerate(french)]
    return (english, [word for word, _ in french], links), plural


def _article(forms: tuple[str, ...], feminine: bool, plural: int, next_word: str) -> str:
    if plural:
        return forms[2]
    return forms[feminine + (3 if next_word[0] in _VOWELS else 0)]


def _append(left: _Words, right: _Words) -> _Words:
    links = [(i + len(left[0]), j + len(left[1])) for i, j in right[2]]
    return left[0] + right[0], left[1] + right[1], left[2] + links


def _join(words: Sequence[str]) -> tuple[str, np.ndarray]:
    """Returns running text and word spans, without a blank between "l'" and its noun."""
    text, spans = "", []
    for word in words:
        if text and not text.endswith("'"):
            text += " "
        spans.append((len(text), len(text) + len(word)))
        text += word
    return text, np.array(spans, np.int32)
