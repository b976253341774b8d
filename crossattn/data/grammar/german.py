"""German: the verb second, participles last, the verb last after "dass"; gender, case, declensions."""

from crossattn.data.grammar import Clause, NounPhrase, Word, concepts, person, tagged

# Gender, singular, plural.
NOUNS = {
    "cat": ("f", "Katze", "Katzen"),
    "dog": ("m", "Hund", "Hunde"),
    "bird": ("m", "Vogel", "Vögel"),
    "horse": ("n", "Pferd", "Pferde"),
    "man": ("m", "Mann", "Männer"),
    "woman": ("f", "Frau", "Frauen"),
    "child": ("n", "Kind", "Kinder"),
    "girl": ("n", "Mädchen", "Mädchen"),
    "friend": ("m", "Freund", "Freunde"),
    "teacher": ("m", "Lehrer", "Lehrer"),
    "house": ("n", "Haus", "Häuser"),
    "car": ("n", "Auto", "Autos"),
    "book": ("n", "Buch", "Bücher"),
    "star": ("m", "Stern", "Sterne"),
    "tree": ("m", "Baum", "Bäume"),
    "school": ("f", "Schule", "Schulen"),
    "mat": ("f", "Matte", "Matten"),
    "chair": ("m", "Stuhl", "Stühle"),
    "table": ("m", "Tisch", "Tische"),
    "bench": ("f", "Bank", "Bänke"),
}
ADJECTIVES = {
    "black": "schwarz",
    "white": "weiß",
    "red": "rot",
    "green": "grün",
    "small": "klein",
    "big": "groß",
    "old": "alt",
    "new": "neu",
    "beautiful": "schön",
    "happy": "glücklich",
    "kind": "freundlich",
}
_FOODS = {
    "ice cream": "Eis",
    "bread": "Brot",
    "fruit": "Obst",
    "rice": "Reis",
    "cheese": "Käse",
    "fish": "Fisch",
    "meat": "Fleisch",
    "cake": "Kuchen",
}
_PRONOUNS = {"I": "ich", "you": "du", "he": "er", "she": "sie", "we": "wir", "they": "sie"}
_ADVERBS = {"yesterday": "gestern", "today": "heute"}
_PREPOSITIONS = {"on": "auf", "under": "unter"}  # of a place at rest, with the dative
# I, you, singular, we, plural; of transitive verbs the present, then the participle; of others the past.
_VERBS = {
    "sit": "saß saßt saß saßen saßen",
    "sleep": "schlief schliefst schlief schliefen schliefen",
    "run": "lief liefst lief liefen liefen",
    "come": "kam kamst kam kamen kamen",
    "see": "sehe siehst sieht sehen sehen gesehen",
    "call": "rufe rufst ruft rufen rufen gerufen",
    "look for": "suche suchst sucht suchen suchen gesucht",
    "push": "schiebe schiebst schiebt schieben schieben geschoben",
    "wash": "wasche wäschst wäscht waschen waschen gewaschen",
    "have": "habe hast hat haben haben",
    "know": "weiß weißt weiß wissen wissen",
    "like": "mag magst mag mögen mögen",
    "be": "bin bist ist sind sind",
}
# Endings by case: masculine, feminine, neuter, plural.
_ARTICLES = {
    "nominative": ("der", "die", "das", "die"),
    "accusative": ("den", "die", "das", "die"),
    "dative": ("dem", "der", "dem", "den"),
}
_ENDINGS = {  # of dieser, and of mein in the plural
    "nominative": ("er", "e", "es", "e"),
    "accusative": ("en", "e", "es", "e"),
    "dative": ("em", "er", "em", "en"),
}
_EIN = {
    "nominative": ("", "e", ""),
    "accusative": ("en", "e", ""),
    "dative": ("em", "er", "em"),
}
# Of adjectives after der and dieser, after ein and mein, after zwei.
_WEAK = {"nominative": ("e", "e", "e", "en"), "accusative": ("en", "e", "e", "en")}
_MIXED = {"nominative": ("er", "e", "es", "en"), "accusative": ("en", "e", "es", "en")}
_STRONG = {"nominative": "e", "accusative": "e", "dative": "en"}


def noun_phrase(phrase: NounPhrase, role: str, case: str) -> list[Word]:
    """Returns the words of a noun phrase in a case."""
    gender, singular, plural = NOUNS[phrase.noun]
    column = 3 if phrase.plural else "mfn".index(gender)
    noun = plural if phrase.plural else singular
    if case == "dative" and phrase.plural and noun[-1] not in "ns":
        noun += "n"
    words = [(_determiner(phrase, case, column), concepts(role, "determiner"))]
    if phrase.adjective:
        if phrase.determiner == "a" and phrase.plural:
            ending = _STRONG[case]
        else:
            table = _WEAK if phrase.determiner in ("the", "this") else _MIXED
            ending = table[case][column] if case in table else "en"
        form = ADJECTIVES[phrase.adjective] + ending
        words.append((form, concepts(role, "adjective")))
    return [*words, (noun, concepts(role, "noun"))]


def _determiner(phrase: NounPhrase, case: str, column: int) -> str:
    if phrase.determiner == "the":
        return _ARTICLES[case][column]
    if phrase.determiner == "this":
        return "dies" + _ENDINGS[case][column]
    if phrase.plural:
        return "zwei" if phrase.determiner == "a" else "mein" + _ENDINGS[case][column]
    return ("ein" if phrase.determiner == "a" else "mein") + _EIN[case][column]


def _form(verb: str, who: int) -> str:
    return _VERBS[verb].split()[who]


def sentence(clause: Clause) -> list[Word]:
    """Returns the words of a clause."""
    subject = _subject(clause.subject)
    if clause.kind == "phrase":
        return subject
    verb, middle, last = _parts(clause)
    if clause.knower:
        know = _form("know", person(clause.knower))
        begin = [(_PRONOUNS[clause.knower], ("knower",)), (know, ("know",)), (",", ())]
        return [*begin, ("dass", ("that",)), *subject, *middle, *last, verb]
    if clause.adverb:
        return [(_ADVERBS[clause.adverb], ("adverb",)), verb, *subject, *middle, *last]
    return [*subject, verb, *middle, *last]


def _subject(subject: NounPhrase | str) -> list[Word]:
    if isinstance(subject, str):
        return tagged(_PRONOUNS[subject], "subject.noun")
    return noun_phrase(subject, "subject", "nominative")


def _parts(clause: Clause) -> tuple[Word, list[Word], list[Word]]:
    """Returns the finite verb, what stands between it and the end, and what stands at the end."""
    who = person(clause.subject)
    if clause.kind == "like":
        return (_form("like", who), ("verb",)), tagged(_FOODS[clause.predicate], "predicate"), []
    if clause.kind == "is":
        said = ADJECTIVES[clause.predicate]
        return (_form("be", who), ("verb",)), tagged(said, "predicate"), []
    if clause.kind == "are":
        return (_form("be", who), ("verb",)), tagged(NOUNS[clause.predicate][2], "predicate"), []
    middle = []
    if clause.object:
        middle = noun_phrase(clause.object, "object", "accusative")
    if clause.place:
        preposition, place = clause.place
        middle = tagged(_PREPOSITIONS[preposition], "preposition")
        middle += noun_phrase(place, "place", "dative")
    if clause.kind == "perfect":
        participle = _VERBS[clause.verb].split()[5]
        return (_form("have", who), ("auxiliary",)), middle, tagged(participle, "verb")
    return (_form(clause.verb, who), ("verb",)), middle, []
