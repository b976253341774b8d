"""Databases of passages: the nearest that a chunk may see, by brute force; leaks; and what is refused."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from crossattn.data import documents, neighbours
from crossattn.data.errors import DataError
from crossattn.data.features import Neighbours, Window
from crossattn.data.neighbours import CharacterNgrams, Database, overlap
from crossattn.data.packing import Layout
from crossattn.data.sources import facts, help_documents, open_source
from crossattn.data.tokenizers import BOS, EOS, train_tokenizer

WORDS = "cell sheet chart slide page table field index macro style print frame image sound".split()
RNG = np.random.default_rng(0)
M, R, K = 6, 12, 3


def _paragraphs(count):
    return [" ".join(RNG.choice(WORDS, RNG.integers(4, 15))) + "." for _ in range(count)]


EXAMPLES = [{"id": f"page{i}", "paragraphs": _paragraphs(4)} for i in range(12)]
LEAK = " ".join(WORDS[::-1]) + " and nothing like it elsewhere."
EXAMPLES[2]["paragraphs"][1] = EXAMPLES[9]["paragraphs"][2] = LEAK
EXAMPLES[5]["paragraphs"][0] = f"  {LEAK.upper()} "
TOKENIZER = train_tokenizer([text for each in EXAMPLES for text in each["paragraphs"]], 500)
DOCUMENTS = documents.read_documents(EXAMPLES, TOKENIZER)
CHUNKS = documents.cut(DOCUMENTS, M, R)


@pytest.fixture
def database(tmp_path):
    neighbours.build(tmp_path / "passages", CHUNKS, TOKENIZER, CharacterNgrams())
    return Database.open(tmp_path / "passages", TOKENIZER, CharacterNgrams())


def test_the_chunks_of_a_window_are_chunks_of_its_document():
    first = 0
    for example, document in zip(EXAMPLES, DOCUMENTS, strict=True):
        texts = [TOKENIZER.encode(text) for text in example["paragraphs"]]
        np.testing.assert_array_equal(
            document.tokens, [BOS] + [i for text in texts for i in [*text, EOS]]
        )
        told = []
        for start, tokens in documents.windows(document, 4 * M):
            told += tokens[1:].tolist()
            for chunk in range((len(tokens) - 1) // M):
                passage = CHUNKS.passages[first + start // M + chunk]
                after = document.tokens[start + chunk * M :][:R]
                np.testing.assert_array_equal(passage, np.pad(after, (0, R - len(after))))
                np.testing.assert_array_equal(passage[:M], tokens[chunk * M : (chunk + 1) * M])
        assert told == document.tokens[1:].tolist()
        first += -(-len(document.tokens) // M)
    assert first == len(CHUNKS)


def _paragraphs_of(number):
    """The texts that a chunk's passage is of, by counting tokens."""
    for example in EXAMPLES:
        texts = [" ".join(text.casefold().split()) for text in example["paragraphs"]]
        owner = [None] + [t for t, raw in zip(texts, example["paragraphs"], strict=True)
                          for _ in range(len(TOKENIZER.encode(raw)) + 1)]  # fmt: skip
        count = -(-len(owner) // M)
        if number < count:
            return example["id"], set(owner[number * M : number * M + R]) - {None}
        number -= count
    raise AssertionError


@pytest.mark.parametrize("spare", [0, 16])
def test_the_nearest_are_those_of_brute_force(database, monkeypatch, spare):
    monkeypatch.setattr(neighbours, "_SPARE", spare)
    monkeypatch.setattr(neighbours, "_ROWS", 7)
    found = database.nearest(database.embeddings, CHUNKS, K)
    vectors = database.embeddings.astype(np.float64)
    about = [_paragraphs_of(i) for i in range(len(CHUNKS))]
    for i, own in enumerate(found):
        allowed = [j for j in range(len(CHUNKS))
                   if about[j][0] != about[i][0] and not about[j][1] & about[i][1]]  # fmt: skip
        best = sorted((vectors[allowed] @ vectors[i]).tolist(), reverse=True)[:K]
        assert set(own.tolist()) <= set(allowed)
        np.testing.assert_allclose(vectors[own] @ vectors[i], best, atol=1e-5)


def test_a_planted_leak_is_caught(database):
    """A paragraph of three pages, once in other letters, is nearest to itself and is not retrieved."""
    leaking = [i for i in range(len(CHUNKS)) if LEAK.casefold() in _paragraphs_of(i)[1]]
    assert {_paragraphs_of(i)[0] for i in leaking} == {"page2", "page5", "page9"}
    vectors = database.embeddings[leaking]
    chosen = documents.Chunks(
        *(CHUNKS.passages[leaking], M, CHUNKS.document[leaking], CHUNKS.paragraphs[leaking])
    )
    told = database.nearest(vectors, chosen, K)
    assert not np.isin(told, leaking).any() and (told >= 0).all()
    careless = database.nearest(vectors, None, K + 1)
    other = CHUNKS.document[careless] != chosen.document[:, None]
    assert (np.isin(careless, leaking) & other).any(
        -1
    ).mean() > 0.6  # but for chunks that barely touch it


def test_embeddings_in_the_index_are_those_of_the_chunks(database):
    np.testing.assert_array_equal(
        database.embeddings, CharacterNgrams()(CHUNKS.texts(TOKENIZER)), strict=True
    )


def test_a_chunk_that_may_see_too_little_gets_what_there_is(tmp_path):
    few = documents.cut(DOCUMENTS[:2], M, R)
    neighbours.build(tmp_path / "few", few, TOKENIZER, CharacterNgrams())
    opened = Database.open(tmp_path / "few", TOKENIZER, CharacterNgrams())
    found = opened.nearest(opened.embeddings, few, len(few))
    sizes = [-(-len(each.tokens) // M) for each in DOCUMENTS[:2]]
    assert ((found >= 0).sum(-1) == np.repeat(sizes[::-1], sizes)).all()
    passages = opened.passages(found)
    assert passages.shape == (len(few), len(few), R) and not passages[found < 0].any()


def test_a_database_is_built_once(database, tmp_path):
    names = {"database.json", "passages.npy", "document.npy", "paragraphs.npy", "embeddings.faiss"}
    before = (tmp_path / "passages" / "embeddings.faiss").stat().st_mtime_ns
    neighbours.build(tmp_path / "passages", CHUNKS, TOKENIZER, CharacterNgrams(32))
    assert (tmp_path / "passages" / "embeddings.faiss").stat().st_mtime_ns == before
    assert {path.name for path in tmp_path.iterdir()} == {"passages"}
    assert {path.name for path in (tmp_path / "passages").iterdir()} == names  # no vector twice


@pytest.mark.skipif(sys.platform != "linux", reason="lists the mapped files as Linux does")
def test_searches_read_one_mapped_index(database, tmp_path, monkeypatch):
    faiss, path = pytest.importorskip("faiss"), tmp_path / "passages" / "embeddings.faiss"
    lines = [x for x in Path("/proc/self/maps").read_text().splitlines() if x.endswith(str(path))]
    assert len(lines) == 1 and lines[0].split()[1].startswith("r--")
    for name in ("IndexFlatIP", "read_index", "knn"):
        monkeypatch.setattr(faiss, name, None)  # neither built nor read again
    vectors = CharacterNgrams()(CHUNKS.texts(TOKENIZER))
    found = database.nearest(vectors, None, K)
    np.testing.assert_array_equal(found[:1], database.nearest(vectors[:1], None, K))
    best = -np.sort(-(vectors.astype(np.float64) @ vectors.T.astype(np.float64)), axis=-1)[:, :K]
    np.testing.assert_allclose((vectors[found] @ vectors[..., None])[..., 0], best, atol=1e-5)


def test_what_does_not_fit_is_refused_in_a_line(database, tmp_path):
    other = train_tokenizer(["other words that make another vocabulary"], 300)
    with pytest.raises(DataError, match="passages of another tokenizer, .*; build it anew$"):
        Database.open(tmp_path / "passages", other, CharacterNgrams())
    with pytest.raises(DataError, match="another embedder, ngrams-512 and not ngrams-32; build"):
        Database.open(tmp_path / "passages", TOKENIZER, CharacterNgrams(32))
    with pytest.raises(DataError, match="no database of passages"):
        Database.open(tmp_path / "nowhere", TOKENIZER, CharacterNgrams())
    with pytest.raises(DataError, match="no passage; expected documents to retrieve from"):
        neighbours.build(tmp_path / "none", documents.cut([], M, R), TOKENIZER, CharacterNgrams())
    record = json.loads((tmp_path / "passages" / "database.json").read_text())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "database.json").write_text(json.dumps(record))
    for name in ("passages", "document", "paragraphs"):
        np.save(tmp_path / "empty" / f"{name}.npy", np.zeros((0, 1)))
    index = tmp_path / "passages" / "embeddings.faiss"
    (tmp_path / "empty" / index.name).write_bytes(index.read_bytes())
    with pytest.raises(DataError, match="empty has no passage; expected documents"):
        Database.open(tmp_path / "empty", TOKENIZER, CharacterNgrams())
    for content in (b"", b"no index", index.read_bytes()[:-1]):
        (tmp_path / "empty" / index.name).write_bytes(content)
        with pytest.raises(DataError, match="empty is no database of passages: "):
            Database.open(tmp_path / "empty", TOKENIZER, CharacterNgrams())
    (tmp_path / "empty" / index.name).unlink()
    with pytest.raises(DataError, match="empty is no database of passages: .*No such file"):
        Database.open(tmp_path / "empty", TOKENIZER, CharacterNgrams())
    with pytest.raises(
        DataError, match="passages have 5 tokens; expected at least those of a chunk, 6"
    ):
        documents.cut(DOCUMENTS, M, 5)
    with pytest.raises(DataError, match="x has no paragraphs; expected a list of texts"):
        documents.read_documents([{"id": "x", "paragraphs": []}], TOKENIZER)


def test_without_faiss_a_line_says_what_to_install(database, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    said = "faiss is not installed: pip install crossattn.retrieval.$"
    with pytest.raises(ModuleNotFoundError, match=said):
        neighbours.build(tmp_path / "new", CHUNKS, TOKENIZER, CharacterNgrams())
    with pytest.raises(ModuleNotFoundError, match=said):
        Database.open(tmp_path / "passages", TOKENIZER, CharacterNgrams())
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("seed", range(5))
def test_overlap_is_the_longest_common_run(seed):
    rng = np.random.default_rng(seed)
    truth, passage = rng.integers(1, 4, 8), rng.integers(1, 4, 12)
    truth[6:] = passage[10:] = 0  # padding in both is nothing in common
    text, other = (bytes(x.tolist()) for x in (truth[:6], passage[:10]))
    runs = [b - a for a in range(6) for b in range(a + 1, 7) if text[a:b] in other]
    assert overlap(truth, passage) == max(runs, default=0) / 6


def test_ngrams_are_of_length_1_and_know_spelling_and_order():
    embed = CharacterNgrams()
    texts = ["insert a chart", "insert charts", "charts insert", "zebra quilt"]
    vectors = embed(texts)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1, atol=1e-6)
    assert not embed([""]).any()
    near = vectors @ vectors.T
    assert near[0, 1] > near[0, 2] > near[0, 3] + 0.2


def test_features_of_windows_and_neighbours():
    layout = Layout(
        2, {"target": 4}, np.array([0]), np.array([1]), {"target": np.array([0])}, np.array([1])
    )
    window, near = Window(4), Neighbours(3, K, R)
    assert window.length([1, 5, 6, 2]) == 3
    batch = window.collate("target", layout, [window.prepare([1, 5, 6, 2])])
    np.testing.assert_array_equal(batch["target_in"], [[0] * 4, [1, 5, 6, 0]])
    np.testing.assert_array_equal(batch["target_out"], [[0] * 4, [5, 6, 2, 0]])
    found = near.collate("neighbours", layout, [near.prepare(np.ones((2, K, R), np.int64))])
    assert found["neighbours"].shape == (2, 3, K, R) and found["neighbours"].sum() == 2 * K * R
    assert found["neighbours"][1, :2].all()
    for feature, value, said in (
        (window, [5], "expected two ids or more"),
        (window, "text", "expected two ids or more"),
        (
            near,
            np.ones((4, K, R)),
            r"neighbours have shape \(4, 3, 12\); expected \(3, 3, 12\), or fewer",
        ),
        (near, np.ones((2, R)), "or fewer chunks"),
    ):
        with pytest.raises(DataError, match=said):
            feature.prepare(value)


def test_facts_stand_in_passages_and_persons_of_the_splits_differ():
    passages = [each["paragraphs"][0] for each in open_source("facts", "passages")]
    things = {text.split(" will ")[0].removeprefix("what "): text.split()[-2] for text in passages}
    assert len(things) == len(passages) == 1600
    asked = {}
    for split in ("train", "validation", "test"):
        texts = [each["paragraphs"][0] for each in open_source("facts", split)]
        told = [part for text in texts for part in text.split("tell me what ")[1:]]
        asked[split] = {part.split(" will ")[0] for part in told}
        for part in told:
            who, _, rest = part.partition(" will bring . ")
            assert rest.split()[:4] == [*who.split(), "brings", things[who]]
    assert sum(map(len, asked.values())) == len(set().union(*asked.values())) == 1600
    counts = np.unique(list(things.values()), return_counts=True)[1]
    assert (
        len(counts) == len(facts.THINGS) == 16 and counts.max() < 0.09 * 1600
    )  # no answer to guess


def test_a_page_has_its_paragraphs_in_their_order():
    rows = [("a/x.html#par_2", "two"), ("b.html#hd_1", "other"), ("a/x.html#par_1", "one")]
    found = help_documents.pages([{"id": i, "source": text, "target": ""} for i, text in rows])
    assert found == [
        {"id": "a/x.html", "paragraphs": ["two", "one"]},
        {"id": "b.html", "paragraphs": ["other"]},
    ]
