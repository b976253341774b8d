"""Japanese: the verb last, postpositions and particles, no articles, polite forms.

Words are separated by spaces, as in books for children: a noun, a verb with its endings, a counter with its
numeral and each particle is a word. は, が and を stand for nothing in English. の after 私, これら or a
counter, and all words of の 上 に, are linked with the English word that they translate.
"""

from crossattn.data.grammar import Clause, NounPhrase, Word, concepts, tagged

# The noun, and "two" with its counter.
NOUNS = {
    "cat": ("猫", "二匹"),
    "dog": ("犬", "二匹"),
    "bird": ("鳥", "二羽"),
    "horse": ("馬", "二頭"),
    "man": ("男性", "二人"),
    "woman": ("女性", "二人"),
    "child": ("子供", "二人"),
    "girl": ("少女", "二人"),
    "friend": ("友達", "二人"),
    "teacher": ("先生", "二人"),
    "house": ("家", "二軒"),
    "car": ("車", "二台"),
    "book": ("本", "二冊"),
    "star": ("星", "二つ"),
    "tree": ("木", "二本"),
    "school": ("学校", "二校"),
    "mat": ("マット", "二枚"),
    "chair": ("椅子", "二脚"),
    "table": ("テーブル", "二台"),
    "bench": ("ベンチ", "二台"),
}
# Before a noun; as a predicate before です.
ADJECTIVES = {
    "black": ("黒い", "黒い"),
    "white": ("白い", "白い"),
    "red": ("赤い", "赤い"),
    "green": ("緑 の", "緑"),
    "small": ("小さい", "小さい"),
    "big": ("大きい", "大きい"),
    "old": ("古い", "古い"),
    "new": ("新しい", "新しい"),
    "beautiful": ("美しい", "美しい"),
    "happy": ("幸せ な", "幸せ"),
    "kind": ("優しい", "優しい"),
}
_FOODS = {
    "ice cream": "アイスクリーム",
    "bread": "パン",
    "fruit": "果物",
    "rice": "ご飯",
    "cheese": "チーズ",
    "fish": "魚",
    "meat": "肉",
    "cake": "ケーキ",
}
_PRONOUNS = {
    "I": "私",
    "you": "あなた",
    "he": "彼",
    "she": "彼女",
    "we": "私たち",
    "they": "彼ら",
}
_ADVERBS = {"yesterday": "昨日", "today": "今日"}
_PREPOSITIONS = {"on": "の 上", "under": "の 下"}
# Polite present, polite past, plain present.
_VERBS = {
    "sit": ("座ります", "座りました", "座る"),
    "sleep": ("寝ます", "寝ました", "寝る"),
    "run": ("走ります", "走りました", "走る"),
    "come": ("来ます", "来ました", "来る"),
    "see": ("見ます", "見ました", "見る"),
    "call": ("呼びます", "呼びました", "呼ぶ"),
    "look for": ("探します", "探しました", "探す"),
    "push": ("押します", "押しました", "押す"),
    "wash": ("洗います", "洗いました", "洗う"),
}


def noun_phrase(phrase: NounPhrase, role: str) -> list[Word]:
    """Returns the words of a noun phrase, without its particle."""
    noun, two = NOUNS[phrase.noun]
    if phrase.plural:
        determiner = {"the": "", "a": f"{two} の", "this": "これら の", "my": "私 の"}
    else:
        determiner = {"the": "", "a": "", "this": "この", "my": "私 の"}
    words = tagged(determiner[phrase.determiner], *concepts(role, "determiner"))
    if phrase.adjective:
        words += tagged(ADJECTIVES[phrase.adjective][0], *concepts(role, "adjective"))
    return [*words, (noun, concepts(role, "noun"))]


def sentence(clause: Clause) -> list[Word]:
    """Returns the words of a clause."""
    if isinstance(clause.subject, str):
        subject = tagged(_PRONOUNS[clause.subject], "subject.noun")
    else:
        subject = noun_phrase(clause.subject, "subject")
    if clause.kind == "phrase":
        return subject
    words: list[Word] = []
    if clause.adverb:
        words += tagged(_ADVERBS[clause.adverb], "adverb")
    if clause.knower:
        words += [*tagged(_PRONOUNS[clause.knower], "knower"), ("は", ())]
    words += [*subject, ("が" if clause.knower else "は", ()), *_predicate(clause)]
    if clause.knower:
        words += [("こと", ("that",)), ("を", ()), *tagged("知って います", "know")]
    return words


def _predicate(clause: Clause) -> list[Word]:
    if clause.kind == "like":
        food = tagged(_FOODS[clause.predicate], "predicate")
        return [*food, ("が", ()), *tagged("好き です", "verb")]
    if clause.kind in ("is", "are"):
        table = ADJECTIVES if clause.kind == "is" else NOUNS
        said = table[clause.predicate][clause.kind == "is"]
        return [*tagged(said, "predicate"), ("です", ("verb",))]
    words: list[Word] = []
    if clause.object:
        words += [*noun_phrase(clause.object, "object"), ("を", ())]
    if clause.place:
        preposition, place = clause.place
        particle = "で" if clause.verb == "sleep" else "に"
        words += noun_phrase(place, "place")
        words += tagged(f"{_PREPOSITIONS[preposition]} {particle}", "preposition")
    form = 2 if clause.knower else clause.kind in ("past", "perfect")
    tags = ("auxiliary", "verb") if clause.kind == "perfect" else ("verb",)
    return [*words, (_VERBS[clause.verb][form], tags)]
