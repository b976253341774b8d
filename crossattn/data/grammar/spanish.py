"""Spanish: adjectives after their noun and in its gender, dropped pronouns, contractions, "me gusta".

A dropped subject is in the verb, which is linked with the English pronoun too. "I", "you" and "we" are
dropped, as verbs tell them.
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

# Whether feminine, singular, plural.
NOUNS = {
    "cat": (False, "gato", "gatos"),
    "dog": (False, "perro", "perros"),
    "bird": (False, "pájaro", "pájaros"),
    "horse": (False, "caballo", "caballos"),
    "man": (False, "hombre", "hombres"),
    "woman": (True, "mujer", "mujeres"),
    "child": (False, "niño", "niños"),
    "girl": (True, "chica", "chicas"),
    "friend": (False, "amigo", "amigos"),
    "teacher": (False, "profesor", "profesores"),
    "house": (True, "casa", "casas"),
    "car": (False, "coche", "coches"),
    "book": (False, "libro", "libros"),
    "star": (True, "estrella", "estrellas"),
    "tree": (False, "árbol", "árboles"),
    "school": (True, "escuela", "escuelas"),
    "mat": (True, "alfombra", "alfombras"),
    "chair": (True, "silla", "sillas"),
    "table": (True, "mesa", "mesas"),
    "bench": (False, "banco", "bancos"),
}
# Masculine, feminine, their plurals.
ADJECTIVES = {
    "black": ("negro", "negra", "negros", "negras"),
    "white": ("blanco", "blanca", "blancos", "blancas"),
    "red": ("rojo", "roja", "rojos", "rojas"),
    "green": ("verde", "verde", "verdes", "verdes"),
    "small": ("pequeño", "pequeña", "pequeños", "pequeñas"),
    "big": ("grande", "grande", "grandes", "grandes"),
    "old": ("viejo", "vieja", "viejos", "viejas"),
    "new": ("nuevo", "nueva", "nuevos", "nuevas"),
    "beautiful": ("hermoso", "hermosa", "hermosos", "hermosas"),
    "happy": ("feliz", "feliz", "felices", "felices"),
    "kind": ("amable", "amable", "amables", "amables"),
}
_DETERMINERS = {
    "the": ("el", "la", "los", "las"),
    "a": ("un", "una", "dos", "dos"),
    "this": ("este", "esta", "estos", "estas"),
    "my": ("mi", "mi", "mis", "mis"),
}
_FOODS = {
    "ice cream": "el helado",
    "bread": "el pan",
    "fruit": "la fruta",
    "rice": "el arroz",
    "cheese": "el queso",
    "fish": "el pescado",
    "meat": "la carne",
    "cake": "el pastel",
}
_PRONOUNS = {"he": "él", "she": "ella", "they": "ellos"}
_DATIVES = ("me", "te", "le", "nos", "les")
_REFLEXIVES = ("me", "te", "se", "nos", "se")
_ADVERBS = {"yesterday": "ayer", "today": "hoy"}
_PREPOSITIONS = {"on": "en", "under": "debajo de"}
_CONTRACTIONS = {("a", "el"): "al", ("de", "el"): "del"}
# I, you, singular, we, plural; of transitive verbs the present, then the participle; of others the past.
_VERBS = {
    "sit": "senté sentaste sentó sentamos sentaron",
    "sleep": "dormí dormiste durmió dormimos durmieron",
    "run": "corrí corriste corrió corrimos corrieron",
    "come": "vine viniste vino vinimos vinieron",
    "see": "veo ves ve vemos ven visto",
    "call": "llamo llamas llama llamamos llaman llamado",
    "look for": "busco buscas busca buscamos buscan buscado",
    "push": "empujo empujas empuja empujamos empujan empujado",
    "wash": "lavo lavas lava lavamos lavan lavado",
    "have": "he has ha hemos han",
    "know": "sé sabes sabe sabemos saben",
    "be": "soy eres es somos son",
}


def noun_phrase(phrase: NounPhrase, role: str) -> list[Word]:
    """Returns the words of a noun phrase."""
    feminine, *nouns = NOUNS[phrase.noun]
    column = 2 * phrase.plural + feminine
    words = [
        (_DETERMINERS[phrase.determiner][column], concepts(role, "determiner")),
        (nouns[phrase.plural], concepts(role, "noun")),
    ]
    if phrase.adjective:
        words.append((ADJECTIVES[phrase.adjective][column], concepts(role, "adjective")))
    return words


def sentence(clause: Clause) -> list[Word]:
    """Returns the words of a clause."""
    words: list[Word] = []
    if clause.adverb:
        words += tagged(_ADVERBS[clause.adverb], "adverb")
    if clause.knower:
        words += _conjugated("know", clause.knower, "knower", "know") + [("que", ("that",))]
    return _contracted(words + (_like(clause) if clause.kind == "like" else _ordinary(clause)))


def _like(clause: Clause) -> list[Word]:
    """Returns "me gusta el helado": who likes is in the dative, and what is liked is the subject."""
    dative, pronoun = _DATIVES[person(clause.subject)], clause.subject
    if pronoun in ("I", "you", "we"):
        words = [(dative, ("subject.noun",))]
    elif isinstance(pronoun, str):
        words = [("a", ()), (_PRONOUNS[pronoun], ("subject.noun",)), (dative, ())]
    else:
        words = [("a", ()), *noun_phrase(pronoun, "subject"), (dative, ())]
    article, food = _FOODS[clause.predicate].split()
    return [*words, ("gusta", ("verb",)), (article, ()), (food, ("predicate",))]


def _ordinary(clause: Clause) -> list[Word]:
    subject, who = clause.subject, person(clause.subject)
    if clause.kind == "phrase" and isinstance(subject, NounPhrase):
        return noun_phrase(subject, "subject")
    if clause.kind == "perfect":
        words = _conjugated("have", subject, "subject.noun", "auxiliary")
        words += tagged(_VERBS[clause.verb].split()[5], "verb")
    else:
        verb = "be" if clause.kind in ("is", "are") else clause.verb
        words = _conjugated(verb, subject, "subject.noun", "verb")
        if verb == "sit":
            words.insert(len(words) - 1, (_REFLEXIVES[who], ("verb",)))
    if clause.kind == "is":
        feminine = subject == "she"
        if isinstance(subject, NounPhrase):
            feminine = NOUNS[subject.noun][0]
        words += tagged(ADJECTIVES[clause.predicate][2 * (who > 2) + feminine], "predicate")
    if clause.kind == "are":
        words += tagged(NOUNS[clause.predicate][2], "predicate")
    if clause.object:
        lives = clause.object.noun in ANIMALS + HUMANS
        words += [("a", ())] * lives + noun_phrase(clause.object, "object")
    if clause.place:
        preposition, place = clause.place
        words += tagged(_PREPOSITIONS[preposition], "preposition")
        words += noun_phrase(place, "place")
    return words


def _conjugated(verb: str, subject: NounPhrase | str, *tags: str) -> list[Word]:
    """Returns subject and verb; the verb has the subject's concept too if the subject is dropped."""
    noun, own = tags
    form = _VERBS[verb].split()[person(subject)]
    if isinstance(subject, NounPhrase):
        return [*noun_phrase(subject, "subject"), (form, (own,))]
    if subject in _PRONOUNS:
        return [(_PRONOUNS[subject], (noun,)), (form, (own,))]
    return [(form, (noun, own))]


def _contracted(words: list[Word]) -> list[Word]:
    """Joins "a el" and "de el"; the joint word has the concepts of both."""
    found: list[Word] = []
    for text, tags in words:
        before = found[-1] if found else ("", ())
        if (before[0], text) in _CONTRACTIONS:
            found[-1] = (_CONTRACTIONS[before[0], text], (*before[1], *tags))
        else:
            found.append((text, tags))
    return found
