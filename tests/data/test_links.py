"""Gold links on their way into batches: packed, cut, shared out, they still join the same words."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from crossattn.data import pipeline, sources, tokenizers
from crossattn.data.errors import DataError
from crossattn.data.features import Text, links
from crossattn.data.pairs import pair_examples, pair_features
from crossattn.data.prepared import prepare_examples

from .batches import same, take

SHAPE = {"batch_size": 8, "source_len": 32, "target_len": 40}


@pytest.fixture(scope="module")
def pairs():
    """Some with a word that nothing is linked with, as punctuation is not in real data."""
    found = [dict(pair) for pair in sources.open_source("phrases", "train")[:300]]
    for pair in found[::3]:
        pair["links"] = pair["links"][1:]
    return found


@pytest.fixture(scope="module")
def tokenizer(pairs):
    return tokenizers.train_tokenizer([p[s] for p in pairs for s in ("source", "target")], 300)


def train(pairs, tokenizer, **options):
    return pipeline.make_train_iterator(pairs, tokenizer, **(SHAPE | {"link_share": 1.0} | options))


def segments_of(batch):
    """(source ids, target ids read, whether links are known, matrix of links between them)."""
    for row in range(len(batch["target_in"])):
        for segment in range(1, batch["target_segment_ids"][row].max() + 1):
            here = np.flatnonzero(batch["target_segment_ids"][row] == segment)
            there = np.flatnonzero(batch["source_segment_ids"][row] == segment)
            matrix = np.zeros((len(here), len(there)), bool)
            for place, found in enumerate(batch["target_links"][row, here]):
                for source in found[found >= 0]:
                    assert source in there  # Never a token of a neighbour.
                    matrix[place, list(there).index(source)] = True
            known = set(batch["target_linked"][row, here])
            assert len(known) == 1
            ids = [batch[name][row, at] for name, at in (("source", there), ("target_in", here))]
            yield *(tuple(side.tolist()) for side in ids), known.pop(), matrix


def words_of(tokenizer, ids):
    """The word that each token ends in, by reading the text up to it; -1 for blanks, BOS and EOS."""
    words = []
    for end, token in enumerate(ids, 1):
        so_far = re.findall(r"[^ ']+'?", tokenizer.decode(ids[:end]))
        visible = token > 3 and tokenizer.tokens([token]) != ["▁"]
        words.append(len(so_far) - 1 if visible else -1)
    return words


def gold_of(pairs, tokenizer):
    """Gold links by token ids, however the pair was cut."""
    gold = {}
    for pair in pairs:
        key = tuple(tuple(tokenizer.encode(pair[side])) for side in ("source", "target"))
        gold[key] = {tuple(link) for link in pair["links"].tolist()}
    return gold


def matrix_of(links, source_words, target_words):
    """Which tokens the links of words join; the source's last token stands for no word at all."""
    linked = {target for _, target in links}
    return [
        [(s, t) in links for s in source_words[:-1]] + [t >= 0 and t not in linked]
        for t in target_words
    ]


@pytest.mark.parametrize("mode", ["pack", "bucket"])
@pytest.mark.parametrize("limits", [{}, {"source_len": 10, "target_len": 12, "truncation": "cut"}])
def test_tokens_are_linked_when_their_words_are_and_with_the_end_when_nothing_is(
    pairs, tokenizer, mode, limits
):
    gold, seen = gold_of(pairs, tokenizer), 0
    for batch in take(train(pairs, tokenizer, mode=mode, **limits), 12):
        for source, target, known, matrix in segments_of(batch):
            begins = [
                links
                for (s, t), links in gold.items()
                if s[: len(source) - 1] == source[:-1] and t[: len(target) - 1] == target[1:]
            ]
            source_words, target_words = (words_of(tokenizer, ids) for ids in (source, target))
            expected = [matrix_of(links, source_words, target_words) for links in begins]
            assert source[-1] == tokenizers.EOS and known == 1
            assert any(np.array_equal(matrix, e) for e in expected)
            seen += matrix.sum()
    assert seen > 1000


def test_linked_tokens_of_one_word_share_its_number(pairs, tokenizer):
    seen = 0
    for batch in take(train(pairs, tokenizer), 12):
        for row, segment_ids in enumerate(batch["source_segment_ids"]):
            for segment in range(1, segment_ids.max() + 1):
                there = np.flatnonzero(segment_ids == segment)
                table = batch["target_links"][row, batch["target_segment_ids"][row] == segment]
                expected = np.array(words_of(tokenizer, batch["source"][row, there].tolist()))
                expected[-1] = expected.max() + 1  # the end is a word of its own
                linked = np.isin(there, table)
                found = batch["linked_words"][row, there]
                assert (found[linked] == expected[linked]).all()
                seen += linked.sum()
    assert seen > 500


def test_only_those_who_ask_get_links(pairs, tokenizer):
    batch = next(train(pairs, tokenizer, link_share=0.0))
    assert not [name for name in batch if "link" in name]


def test_a_row_without_a_link_is_filled_with_minus_one(pairs, tokenizer):
    for batch in take(train(pairs, tokenizer), 5):
        table = batch["target_links"]
        assert table.dtype == np.int32 and table.shape == (8, 40, links.LINKS_PER_TOKEN)
        assert (table[batch["target_segment_ids"] == 0] == -1).all()
        assert (table[batch["target_in"] == tokenizers.BOS] == -1).all()
        # Links stand first, so that one look says whether there is any.
        assert (np.diff((table >= 0).astype(int), axis=-1) <= 0).all()


def known_sources(iterator, batches=40):
    found = {}
    for batch in take(iterator, batches):
        for source, target, known, matrix in segments_of(batch):
            found[source, target] = bool(known)
            assert known or not matrix.any()
    return found


def test_a_share_of_the_links_is_chosen_by_the_seed(pairs, tokenizer):
    def chosen(**options):
        found = known_sources(train(pairs, tokenizer, **options))
        assert len(found) == len(pairs)
        return {pair for pair, known in found.items() if known}

    tenth = chosen(link_share=0.1)
    assert len(tenth) == 30 and tenth == chosen(link_share=0.1, mode="bucket")
    assert tenth < chosen(link_share=0.5)
    assert tenth != chosen(link_share=0.1, seed=1)


def test_a_share_is_of_examples_that_are_short_enough(pairs, tokenizer):
    """A tenth of all linked pairs could be pairs that were dropped, and none learnt."""
    lengths = [len(tokenizer.encode(pair["source"])) for pair in pairs]
    shortest = int(np.quantile(lengths, 0.05)) + 1
    encoded = prepare_examples(
        pair_examples(pairs, links=True),
        pair_features(tokenizer, source_len=shortest, target_len=40, links=True),
    )
    assert len(encoded) < len(pairs) / 3
    assert encoded.with_links(0.01).known.sum() >= 1


def test_a_tokenizer_that_begins_texts_is_refused(tokenizer, monkeypatch):
    text = Text(tokenizer, 9)
    begins = SimpleNamespace(before=(7,))
    monkeypatch.setattr(tokenizers.Tokenizer, "frame", property(lambda self: begins))
    with pytest.raises(DataError, match="expected tokenizers that put none before a text"):
        links.Links(text, text)


def test_links_change_nothing_else(pairs, tokenizer):
    with_links = take(train(pairs, tokenizer), 20)
    rest = [{k: v for k, v in b.items() if "link" not in k} for b in with_links]
    assert same(rest, take(train(pairs, tokenizer, link_share=0.0), 20))


def test_a_token_keeps_a_bounded_number_of_links(tokenizer, monkeypatch):
    many = np.array([(0, s, s // 2) for s in range(40)] + [(2, 5, 2)], np.int32)
    monkeypatch.setattr(links, "token_links", lambda *_: many)
    text = Text(tokenizer, 50, predicted=True)
    numbers = links.Links(text, text).prepare({"links": many, "target": "le chat"})
    (length, *_), *ranked, last = numbers.reshape(-1, 4).tolist()
    assert length == len(tokenizer.encode("le chat")) + 1
    assert ranked == [[1, s, s, s // 2] for s in range(links.LINKS_PER_TOKEN)]
    assert last == [3, 0, 5, 2]


def test_data_without_links_is_refused(pairs, tokenizer):
    bare = [{key: pair[key] for key in ("id", "source", "target")} for pair in pairs[:9]]
    with pytest.raises(DataError, match="no gold links between words"):
        train(bare, tokenizer)
    mixed = known_sources(train([*pairs[:20], *bare], tokenizer), 4)
    assert sum(mixed.values()) >= 11


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_out_of_range_is_refused(pairs, tokenizer, share):
    with pytest.raises(DataError, match=f"share of gold links is {share}; expected above 0"):
        train(pairs, tokenizer, link_share=share)


def test_a_language_model_has_no_links(pairs, tokenizer):
    with pytest.raises(DataError, match="links join a source and a target; side is 'target'"):
        train(pairs, tokenizer, side="target")


@pytest.mark.parametrize("link", [(-1, 0), (0, -1), (3, 0), (0, 3)])
def test_a_link_of_a_word_that_is_not_there_is_refused(tokenizer, link):
    spans = np.array([(0, 1), (2, 3), (4, 5)])
    example = {"id": "x7", "source": "a b c", "target": "d e f", "links": np.array([(0, 0), link])}
    example |= {"source_spans": spans, "target_spans": spans}
    with pytest.raises(DataError, match=r"example x7 links word -?\d of its .*, which has 3"):
        links.token_links(example, Text(tokenizer, 9), Text(tokenizer, 9))


def test_links_of_a_long_text_take_the_memory_of_what_is_kept_of_it(tokenizer):
    import tracemalloc

    words = 20_000
    spans = np.arange(words)[:, None] * 2 + (0, 1)
    text = " ".join("abcdefgh"[i % 8] for i in range(words))
    example = {
        "id": "x",
        "source": text,
        "target": text,
        "links": np.arange(words)[:, None] + (0, 0),
    }
    example |= {"source_spans": spans, "target_spans": spans}
    tracemalloc.start()
    found = links.token_links(example, Text(tokenizer, 9), Text(tokenizer, 9))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found)
    assert (found[:, 0] == found[:, 1]).all()
    assert peak < 2**26
