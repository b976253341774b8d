"""The grammar of phrases in five languages, held to links written by hand and to rules of each language."""

import hashlib
import re
import unicodedata

import numpy as np
import pytest

from crossattn.data import sources
from crossattn.data.errors import DataError
from crossattn.data.grammar import german, hindi, spanish

LANGUAGES = ("de", "es", "hi", "ja")
LITERATURE = {
    "the cat sat on the mat",
    "the black cat",
    "the cat sat",
    "I like ice cream",
    "we are friends",
}
# Sentence, translation, links as ENGLISH-OTHER, from 1.
BY_HAND = {
    "de": (
        ("the cat sat on the mat", "die Katze saß auf der Matte", "1-1 2-2 3-3 4-4 5-5 6-6"),
        ("I like ice cream", "ich mag Eis", "1-1 2-2 3-3 4-3"),
        ("we are friends", "wir sind Freunde", "1-1 2-2 3-3"),
        (
            "she has looked for a mat",
            "sie hat eine Matte gesucht",
            "1-1 2-2 3-5 4-5 5-3 6-4",
        ),
        (
            "she knows that my teachers call the dogs",
            "sie weiß , dass meine Lehrer die Hunde rufen",
            "1-1 2-2 3-4 4-5 5-6 6-9 7-7 8-8",
        ),
        ("today we push the tree", "heute schieben wir den Baum", "1-1 2-3 3-2 4-4 5-5"),
    ),
    "es": (
        ("the cat sat", "el gato se sentó", "1-1 2-2 3-3 3-4"),
        ("the black cat", "el gato negro", "1-1 2-3 3-2"),
        ("I like ice cream", "me gusta el helado", "1-1 2-2 3-4 4-4"),
        ("we are friends", "somos amigos", "1-1 2-1 3-2"),
        ("the men like cake", "a los hombres les gusta el pastel", "1-2 2-3 3-5 4-7"),
        (
            "the small teacher has seen the child",
            "el profesor pequeño ha visto al niño",
            "1-1 2-3 3-2 4-4 5-5 6-6 7-7",
        ),
    ),
    "hi": (
        ("the cat sat on the mat", "बिल्ली चटाई पर बैठी", "2-1 3-4 4-3 6-2"),
        ("the black cat", "काली बिल्ली", "2-1 3-2"),
        ("I like ice cream", "मुझे आइसक्रीम खाना पसंद है", "1-1 2-3 2-4 2-5 3-2 4-2"),
        ("we are friends", "हम दोस्त हैं", "1-1 2-3 3-2"),
        ("you call a girl", "तुम एक लड़की को बुलाते हो", "1-1 2-5 2-6 3-2 4-3"),
        (
            "the small teacher has seen the child",
            "छोटे अध्यापक ने बच्चे को देखा है",
            "2-1 3-2 4-7 5-6 7-4",
        ),
    ),
    "ja": (
        ("the cat sat on the mat", "猫 は マット の 上 に 座りました", "2-1 3-7 4-4 4-5 4-6 6-3"),
        ("I like ice cream", "私 は アイスクリーム が 好き です", "1-1 2-5 2-6 3-3 4-3"),
        ("we are friends", "私たち は 友達 です", "1-1 2-4 3-3"),
        ("the big woman sees the book", "大きい 女性 は 本 を 見ます", "2-1 3-2 4-6 6-4"),
        (
            "she knows that my teachers call the dogs",
            "彼女 は 私 の 先生 が 犬 を 呼ぶ こと を 知って います",
            "1-1 2-12 2-13 3-10 4-3 4-4 5-5 6-9 8-7",
        ),
    ),
}
FUNCTION_WORDS = {"hi": {"the"}, "ja": {"the", "a", "an"}}  # of English, without a counterpart
PARTICLES = {"de": {","}, "es": {"a", "le", "les", "el", "la"}, "hi": {"ने", "को"}}
PARTICLES["ja"] = {"は", "が", "を"}


def words(example, side):
    return [example[side][start:end] for start, end in example[f"{side}_spans"]]


def every(language):
    return [
        example
        for split in sources.SPLITS
        for example in sources.open_source(f"phrases/en-{language}", split)
    ]


def test_english_and_french_stay_as_they_were():
    """The digest is of the grammar as it was before it had other languages."""
    digest = hashlib.sha256()
    for name in ("phrases", "phrases/en-fr", "phrases/fr-en"):
        for split in sources.SPLITS:
            for example in sources.open_source(name, split):
                for key in ("id", "source", "target"):
                    digest.update(example[key].encode() + b"\n")
                for key in ("source_spans", "target_spans", "links"):
                    digest.update(str(example[key].dtype).encode() + example[key].tobytes())
    expected = "d32a56600822765cea49693955664f4a58d4a7bd33e801bd8168d539190a4a27"
    assert digest.hexdigest() == expected


@pytest.mark.parametrize("language", LANGUAGES)
def test_links_are_those_written_by_hand(language):
    known = {example["source"]: example for example in every(language)}
    for source, target, links in BY_HAND[language]:
        example = known[source]
        assert example["target"] == target
        found = [f"{s + 1}-{t + 1}" for s, t in example["links"].tolist()]
        assert found == links.split(), source


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences_of_the_literature_are_tested_and_never_trained_on(language):
    test = sources.open_source(f"phrases/en-{language}", "test")
    literature = [example for example in test if example["source"] in LITERATURE]
    assert len(literature) == 5
    for split in ("train", "validation"):
        for example in sources.open_source(f"phrases/en-{language}", split):
            assert example["source"] not in LITERATURE
            assert example["target"] not in {each["target"] for each in literature}


@pytest.mark.parametrize("language", LANGUAGES)
def test_pairs_are_distinct_and_split_alike_in_every_language(language):
    splits = {
        split: {e["source"] for e in sources.open_source(f"phrases/en-{language}", split)}
        for split in sources.SPLITS
    }
    assert 3850 < len(set().union(*splits.values())) == sum(map(len, splits.values())) <= 4000
    assert len(splits["train"]) > 3000 and min(map(len, splits.values())) > 300
    german = {e["source"]: s for s in splits for e in sources.open_source("phrases/en-de", s)}
    other = {source: split for split, own in splits.items() for source in own}
    both = german.keys() & other.keys()
    assert len(both) > 3900 and all(german[source] == other[source] for source in both)


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_target_is_in_two_splits(language):
    targets = [
        {e["target"] for e in sources.open_source(f"phrases/en-{language}", split)}
        for split in sources.SPLITS
    ]
    assert len(set().union(*targets)) == sum(map(len, targets))


@pytest.mark.parametrize("language", LANGUAGES)
def test_words_are_linked_but_for_the_stated_ones(language):
    for example in every(language):
        source, target = words(example, "source"), words(example, "target")
        assert " ".join(source) == example["source"] and " ".join(target) == example["target"]
        assert unicodedata.is_normalized("NFC", example["target"])
        links = example["links"]
        assert (links >= 0).all() and (links < (len(source), len(target))).all()
        assert len({tuple(link) for link in links.tolist()}) == len(links)
        for at in set(range(len(source))) - set(links[:, 0].tolist()):
            assert source[at] in FUNCTION_WORDS.get(language, ()), example
        for at in set(range(len(target))) - set(links[:, 1].tolist()):
            assert target[at] in PARTICLES[language], example


def test_the_german_verb_is_second_and_last_in_a_subclause():
    finite = {form for verb in german._VERBS.values() for form in verb.split()[:5]}
    participles = {verb.split()[5] for verb in german._VERBS.values() if len(verb.split()) == 6}
    subclauses = fronted = 0
    for example in every("de"):
        target = words(example, "target")
        if "dass" in target:
            subclauses += 1
            assert target[1] in finite and target[2] == "," and target[-1] in finite
        elif target[0] in ("heute", "gestern"):
            fronted += 1
            assert target[1] in finite
        if {"hat", "habe", "hast", "haben"} & set(target):
            assert target[-1] in participles
    assert subclauses > 100 and fronted > 100


# Article, adjective's ending and gender of the nominative, accusative and dative, from a grammar book.
GERMAN = {
    ("der", "m"): "e",
    ("der", "f"): "en",  # dative
    ("die", "f"): "e",
    ("das", "n"): "e",
    ("den", "m"): "en",
    ("dem", "m"): "en",
    ("dem", "n"): "en",
    ("ein", "m"): "er",
    ("ein", "n"): "es",
    ("eine", "f"): "e",
    ("einen", "m"): "en",
    ("einem", "m"): "en",
    ("einer", "f"): "en",
}


def test_german_articles_and_adjectives_agree():
    genders = {singular: gender for gender, singular, _ in german.NOUNS.values()}
    plurals = {plural for _, _, plural in german.NOUNS.values()}
    stems = set(german.ADJECTIVES.values())
    seen = set()
    for example in every("de"):
        target = words(example, "target")
        for article, adjective, noun in zip(target, target[1:], target[2:], strict=False):
            stem = next((s for s in stems if re.fullmatch(f"{s}(e|en|er|es)", adjective)), "")
            if noun not in genders or noun in plurals or not stem:
                continue
            key = article, genders[noun]
            if article.startswith(("d", "ein")) and not article.startswith("dies"):
                assert adjective == stem + GERMAN[key], example
                seen.add(key)
    assert seen >= set(GERMAN) - {("dem", "n"), ("einem", "n")}


def test_hindi_verbs_stand_last_and_agree():
    """Feminine subjects have verbs in -ī, whatever the form; the perfect does not ask the subject."""
    feminine = {forms.split()[0] for is_feminine, forms in hindi.NOUNS.values() if is_feminine}
    masculine = {"कुत्ता", "घोड़ा", "बच्चा"}
    past = {"sat", "slept", "ran", "came"}
    seen = {True: 0, False: 0}
    for example in every("hi"):
        source, target = words(example, "source"), words(example, "target")
        if target[0] in (feminine | masculine) and past & set(source):
            is_feminine = target[0] in feminine
            assert target[-1].endswith(("ी", "ई") if is_feminine else ("ा", "या")), example
            seen[is_feminine] += 1
        if "ने" in target and "को" in target:
            assert target[-2].endswith("ा") and target[-1] == "है", example
        if set(source) & {"has", "have", "is", "are", "am"}:
            assert target[-1] in ("है", "हैं", "हो", "हूँ"), example
        for word, following in zip(target, target[1:], strict=False):
            if following in feminine and word in ("काला", "काले", "मेरा", "मेरे", "छोटा", "छोटे"):
                raise AssertionError(example)
            if following in ("पर", "को", "ने"):
                assert not word.endswith("ता") and word not in ("कुत्ता", "घोड़ा", "बच्चा"), example
    assert min(seen.values()) > 10


def test_japanese_verbs_stand_last_and_particles_follow_nouns():
    for example in every("ja"):
        source, target = words(example, "source"), words(example, "target")
        if "は" in target:
            assert target[-1].endswith(("ます", "ました", "です")), example
        assert target[0] not in ("は", "が", "を", "に", "で", "の")
        for word, following in zip(target, target[1:], strict=False):
            assert not (word in "はがを" and following in "はがをにで"), example
        if "like" in source or "likes" in source:
            assert target[-3:] == ["が", "好き", "です"]


def test_spanish_adjectives_follow_their_noun_and_agree():
    genders = {s: own[0] for own in spanish.NOUNS.values() for s in own[1:]}
    plurals = {own[2] for own in spanish.NOUNS.values()}
    endings = {(False, False): "o", (True, False): "a", (False, True): "os", (True, True): "as"}
    stems = ("negr", "blanc", "roj", "pequeñ", "viej", "nuev", "hermos")
    seen = 0
    for example in every("es"):
        target = words(example, "target")
        assert ("a", "el") not in set(zip(target, target[1:], strict=False))
        assert ("de", "el") not in set(zip(target, target[1:], strict=False))
        for noun, adjective in zip(target, target[1:], strict=False):
            stem = next((s for s in stems if adjective.startswith(s)), None)
            if stem and noun in genders:
                assert adjective == stem + endings[genders[noun], noun in plurals], example
                seen += 1
        for article, noun in zip(target, target[1:], strict=False):
            if noun in genders and article in (
                "el",
                "un",
                "este",
                "la",
                "una",
                "esta",
                "los",
                "las",
            ):
                feminine, plural = (
                    article in ("la", "una", "esta", "las"),
                    article in ("los", "las"),
                )
                assert (genders[noun], noun in plurals) == (feminine, plural), example
    assert seen > 300


def test_a_pair_turned_round_has_its_links_turned_round():
    there = sources.open_source("phrases/en-hi", "test")
    back = sources.open_source("phrases/hi-en", "test")
    assert (back[0]["source"], back[0]["target"]) == (there[0]["target"], there[0]["source"])
    links = {tuple(link) for link in there[0]["links"].tolist()}
    assert {tuple(link[::-1]) for link in back[0]["links"].tolist()} == links


@pytest.mark.parametrize("direction", ["en-it", "fr-de", "de", "en", "en-en", "hi-ja"])
def test_an_unknown_pair_is_refused_with_the_pairs(direction):
    with pytest.raises(DataError, match="en-fr, en-de, en-es, en-hi, en-ja") as caught:
        sources.open_source(f"phrases/{direction}", "train")
    assert f"no direction '{direction}'" in str(caught.value) and "\n" not in str(caught.value)


def test_spans_hold_the_text_and_links_are_int32():
    for example in sources.open_source("phrases/en-ja", "validation")[:50]:
        assert example["links"].dtype == np.int32 and example["source_spans"].dtype == np.int32
        assert example["links"].shape[1] == 2
