"""English sentences of the grammar."""

from crossattn.data.grammar import Clause, NounPhrase, Word, concepts, person, tagged

PLURALS = {"man": "men", "woman": "women", "child": "children", "bench": "benches"}
_DETERMINERS = {"the": "the", "a": "two", "this": "these", "my": "my"}
_BE = ("am", "are", "is", "are", "are")
# Singular of the present, past, participle; what follows them all.
VERBS = {
    "sit": ("sits", "sat", "sat", ""),
    "sleep": ("sleeps", "slept", "slept", ""),
    "run": ("runs", "ran", "run", ""),
    "come": ("comes", "came", "come", ""),
    "see": ("sees", "saw", "seen", ""),
    "call": ("calls", "called", "called", ""),
    "look for": ("looks", "looked", "looked", "for"),
    "push": ("pushes", "pushed", "pushed", ""),
    "wash": ("washes", "washed", "washed", ""),
}


def noun_phrase(phrase: NounPhrase, role: str) -> list[Word]:
    """Returns the words of a noun phrase of a role: subject, object or place."""
    noun, plural = phrase.noun, phrase.plural
    determiner = _DETERMINERS[phrase.determiner] if plural else phrase.determiner
    words = [(phrase.adjective, concepts(role, "adjective"))] if phrase.adjective else []
    words.append((plural_of(noun) if plural else noun, concepts(role, "noun")))
    if determiner == "a" and words[0][0][0] in "aeiou":
        determiner = "an"
    return [(determiner, concepts(role, "determiner")), *words]


def plural_of(noun: str) -> str:
    """Returns the plural of a noun."""
    return PLURALS.get(noun, f"{noun}s")


def sentence(clause: Clause) -> list[Word]:
    """Returns the words of a clause."""
    words: list[Word] = []
    if clause.adverb:
        words += tagged(clause.adverb, "adverb")
    if clause.knower:
        know = "knows" if person(clause.knower) == 2 else "know"
        words += [(clause.knower, ("knower",)), (know, ("know",)), ("that", ("that",))]
    if isinstance(clause.subject, str):
        words.append((clause.subject, ("subject.noun",)))
    else:
        words += noun_phrase(clause.subject, "subject")
    return words + _predicate(clause)


def _predicate(clause: Clause) -> list[Word]:
    who = person(clause.subject)
    if clause.kind == "phrase":
        return []
    if clause.kind == "like":
        like = "likes" if who == 2 else "like"
        return [(like, ("verb",)), *tagged(clause.predicate, "predicate")]
    if clause.kind in ("is", "are"):
        predicate = plural_of(clause.predicate) if clause.kind == "are" else clause.predicate
        return [(_BE[who], ("verb",)), (predicate, ("predicate",))]
    singular, past, participle, after = VERBS[clause.verb]
    words: list[Word] = []
    if clause.kind == "perfect":
        words = [("has" if who == 2 else "have", ("auxiliary",)), (participle, ("verb",))]
    elif clause.kind == "past":
        words = [(past, ("verb",))]
    else:
        words = [(singular if who == 2 else clause.verb.split()[0], ("verb",))]
    words += tagged(after, "verb")
    if clause.object:
        words += noun_phrase(clause.object, "object")
    if clause.place:
        preposition, place = clause.place
        words += [(preposition, ("preposition",)), *noun_phrase(place, "place")]
    return words
