"""Hindi: the verb last, postpositions after oblique nouns, adjectives and verbs that agree in gender.

"The" has no counterpart, and "a" is एक. Objects that live have को, and the perfect then agrees with nothing;
its subject has ने. को and ने after a noun stand for nothing in English; a pronoun contains them. "Likes X" is
"X खाना पसंद है", and all three words of it are linked with "likes". "I", "you", "we" and "they" are
masculine.
"""

from crossattn.data.grammar import (
    ANIMALS,
    HUMANS,
    Clause,
    NounPhrase,
    Word,
    concepts,
    person,
    tagged,
)

# Whether feminine, singular, plural, oblique singular, oblique plural.
NOUNS = {
    "cat": (True, "बिल्ली बिल्लियाँ बिल्ली बिल्लियों"),
    "dog": (False, "कुत्ता कुत्ते कुत्ते कुत्तों"),
    "bird": (True, "चिड़िया चिड़ियाँ चिड़िया चिड़ियों"),
    "horse": (False, "घोड़ा घोड़े घोड़े घोड़ों"),
    "man": (False, "आदमी आदमी आदमी आदमियों"),
    "woman": (True, "औरत औरतें औरत औरतों"),
    "child": (False, "बच्चा बच्चे बच्चे बच्चों"),
    "girl": (True, "लड़की लड़कियाँ लड़की लड़कियों"),
    "friend": (False, "दोस्त दोस्त दोस्त दोस्तों"),
    "teacher": (False, "अध्यापक अध्यापक अध्यापक अध्यापकों"),
    "house": (False, "घर घर घर घरों"),
    "car": (True, "गाड़ी गाड़ियाँ गाड़ी गाड़ियों"),
    "book": (True, "किताब किताबें किताब किताबों"),
    "star": (False, "तारा तारे तारे तारों"),
    "tree": (False, "पेड़ पेड़ पेड़ पेड़ों"),
    "school": (False, "स्कूल स्कूल स्कूल स्कूलों"),
    "mat": (True, "चटाई चटाइयाँ चटाई चटाइयों"),
    "chair": (True, "कुर्सी कुर्सियाँ कुर्सी कुर्सियों"),
    "table": (True, "मेज़ मेज़ें मेज़ मेज़ों"),
    "bench": (True, "बेंच बेंचें बेंच बेंचों"),
}
# Masculine singular; masculine plural and oblique; feminine.
ADJECTIVES = {
    "black": ("काला", "काले", "काली"),
    "white": ("सफ़ेद",) * 3,
    "red": ("लाल",) * 3,
    "green": ("हरा", "हरे", "हरी"),
    "small": ("छोटा", "छोटे", "छोटी"),
    "big": ("बड़ा", "बड़े", "बड़ी"),
    "old": ("पुराना", "पुराने", "पुरानी"),
    "new": ("नया", "नए", "नई"),
    "beautiful": ("सुंदर",) * 3,
    "happy": ("खुश",) * 3,
    "kind": ("दयालु",) * 3,
}
_MY, _OWN = ("मेरा", "मेरे", "मेरी"), ("अपना", "अपने", "अपनी")
_THIS = ("यह", "ये", "इस", "इन")
_FOODS = {
    "ice cream": "आइसक्रीम",
    "bread": "रोटी",
    "fruit": "फल",
    "rice": "चावल",
    "cheese": "पनीर",
    "fish": "मछली",
    "meat": "मांस",
    "cake": "केक",
}
# Alone, with ने, with को.
_PRONOUNS = {
    "I": ("मैं", "मैंने", "मुझे"),
    "you": ("तुम", "तुमने", "तुम्हें"),
    "he": ("वह", "उसने", "उसे"),
    "she": ("वह", "उसने", "उसे"),
    "we": ("हम", "हमने", "हमें"),
    "they": ("वे", "उन्होंने", "उन्हें"),
}
_ADVERBS = {"yesterday": "कल", "today": "आज"}
_PREPOSITIONS = {"on": "पर", "under": "के नीचे"}
# Masculine singular and plural, feminine singular and plural of the past.
_PASTS = {
    "sit": ("बैठा", "बैठे", "बैठी", "बैठीं"),
    "sleep": ("सोया", "सोए", "सोई", "सोईं"),
    "run": ("दौड़ा", "दौड़े", "दौड़ी", "दौड़ीं"),
    "come": ("आया", "आए", "आई", "आईं"),
}
# The stem of the present; masculine singular and plural, feminine of the perfect.
_VERBS = {
    "see": ("देख", "देखा", "देखे", "देखी"),
    "call": ("बुला", "बुलाया", "बुलाए", "बुलाई"),
    "look for": ("ढूँढ", "ढूँढा", "ढूँढे", "ढूँढी"),
    "push": ("धकेल", "धकेला", "धकेले", "धकेली"),
    "wash": ("धो", "धोया", "धोए", "धोई"),
    "know": ("जान", "जाना", "जाने", "जानी"),
}
_BE = ("हूँ", "हो", "है", "हैं", "हैं")


def noun_phrase(
    phrase: NounPhrase, role: str, oblique: bool = False, own: bool = False
) -> list[Word]:
    """Returns the words of a noun phrase, oblique before a postposition; ``own``: "my" is the subject's."""
    feminine, forms = NOUNS[phrase.noun]
    place = 2 if feminine else int(phrase.plural or oblique)
    case = 2 * oblique + phrase.plural
    determiner = {
        "the": "",
        "a": "दो" if phrase.plural else "एक",
        "this": _THIS[case],
        "my": (_OWN if own else _MY)[place],
    }
    words = tagged(determiner[phrase.determiner], *concepts(role, "determiner"))
    if phrase.adjective:
        words += tagged(ADJECTIVES[phrase.adjective][place], *concepts(role, "adjective"))
    return [*words, (forms.split()[case], concepts(role, "noun"))]


def _subject(subject: NounPhrase | str, particle: str = "") -> list[Word]:
    if isinstance(subject, str):
        return tagged(_PRONOUNS[subject][("", "ने", "को").index(particle)], "subject.noun")
    return noun_phrase(subject, "subject", oblique=bool(particle)) + tagged(particle)


def _agreement(who: NounPhrase | str) -> tuple[bool, bool]:
    """Returns whether what a verb agrees with is feminine, and whether plural; तुम is."""
    if isinstance(who, str):
        return who == "she", person(who) in (1, 3, 4)
    return NOUNS[who.noun][0], who.plural


def sentence(clause: Clause) -> list[Word]:
    """Returns the words of a clause."""
    words: list[Word] = []
    if clause.adverb:
        words += tagged(_ADVERBS[clause.adverb], "adverb")
    if clause.knower:
        words += tagged(_PRONOUNS[clause.knower][0], "knower")
        words += tagged(_present("know", clause.knower), "know") + [("कि", ("that",))]
    particle = {"perfect": "ने", "like": "को"}.get(clause.kind, "")
    return words + _subject(clause.subject, particle) + _predicate(clause)


def _predicate(clause: Clause) -> list[Word]:
    subject = clause.subject
    if clause.kind == "phrase":
        return []
    if clause.kind == "like":
        return tagged(_FOODS[clause.predicate], "predicate") + tagged("खाना पसंद है", "verb")
    feminine, plural = _agreement(subject)
    if clause.kind in ("is", "are"):
        said = NOUNS[clause.predicate][1].split()[1] if clause.kind == "are" else ""
        said = said or ADJECTIVES[clause.predicate][2 if feminine else int(plural)]
        return [(said, ("predicate",)), (_BE[person(subject)], ("verb",))]
    words: list[Word] = []
    if clause.place:
        preposition, place = clause.place
        words += noun_phrase(place, "place", oblique=True)
        words += tagged(_PREPOSITIONS[preposition], "preposition")
    if clause.object is None:
        return [*words, (_PASTS[clause.verb][2 * feminine + plural], ("verb",))]
    lives = clause.object.noun in ANIMALS + HUMANS
    words += noun_phrase(clause.object, "object", lives, own=subject == "I")
    words += tagged("को" if lives else "")
    if clause.kind == "present":
        return words + tagged(_present(clause.verb, subject), "verb")
    feminine, plural = (False, False) if lives else _agreement(clause.object)
    participle = _VERBS[clause.verb][3 if feminine else 1 + plural]
    auxiliary = _BE[4 if plural else 2]
    return [*words, (participle, ("verb",)), (auxiliary, ("auxiliary",))]


def _present(verb: str, subject: NounPhrase | str) -> str:
    """Returns the habitual participle and the auxiliary, which agree with the subject."""
    feminine, plural = _agreement(subject)
    ending = "ती" if feminine else "ते" if plural else "ता"
    return f"{_VERBS[verb][0]}{ending} {_BE[person(subject)]}"
