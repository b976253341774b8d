"""Gold links between words, as links between tokens that travel with a batch.

A token of a word is linked with every token of the words that its word is linked with; a token of a
word without a link, such as punctuation, with the source's end, the empty word of IBM's models. The
link is kept under the place at which the decoder reads the target token.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from crossattn.data.errors import DataError
from crossattn.data.tokenizers import Tokenizer
from crossattn.data.words import words_of_tokens

# Of 228,000 Greek-English tokens 5 have more: idioms linked as a whole, of which these are a part.
LINKS_PER_TOKEN = 16


@dataclass(frozen=True)
class TokenLinks:
    """Links of all pairs in one array: those of pair `i` are table[offsets[i] : offsets[i + 1]].

    A row is (place in the decoder's input, how manieth link of that place, source token, its word).
    `known` says which pairs' links were given; a pair may have known links and yet not one.
    """

    table: Int[np.ndarray, "total 4"]
    offsets: Int[np.ndarray, " edges"]
    known: Bool[np.ndarray, " pairs"]

    def __getitem__(self, pair: int) -> Int[np.ndarray, "links 4"]:
        return self.table[self.offsets[pair] : self.offsets[pair + 1]]

    def fingerprint(self) -> int:
        """A checksum of all links; differs when other pairs' links are known."""
        return zlib.crc32(self.table.tobytes(), zlib.crc32(self.known.tobytes()))


def token_links(
    example: dict[str, Any],
    tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    source_len: int,
    target_len: int,
) -> Int[np.ndarray, "links 3"]:
    """(target token, source token, its word) of every pair of tokens whose words are linked, in order.

    Tokens of a target word without links get one with the source's end, a word of its own whose
    place is that of EOS. The lengths cut as they cut the tokens: the source keeps its EOS, the
    decoder reads BOS first.

    Raises:
        DataError: a link is of a word that there is not.
    """
    words = []
    for side, own, length in (
        ("target", target_tokenizer, target_len),
        ("source", tokenizer, source_len),
    ):
        _, spans = own.encode_with_spans(example[side])
        words.append(words_of_tokens(spans[: length - 1], example[f"{side}_spans"]))
    target, source = words
    links = _checked(example)
    to_end = (target >= 0) & ~np.isin(target, links[:, 1])
    # Of the words that are left. The last row and column, which a token outside every word (-1) takes,
    # stay empty.
    shape = target.max(initial=-1) + 2, source.max(initial=-1) + 2
    linked = np.zeros(shape, bool)
    kept = links[(links[:, 1] < shape[0] - 1) & (links[:, 0] < shape[1] - 1)]
    linked[kept[:, 1], kept[:, 0]] = True
    matrix = np.concatenate([linked[target][:, source], to_end[:, None]], axis=1)
    target_token, source_token = np.nonzero(matrix)
    word = np.append(source, len(example["source_spans"]))[source_token]
    return np.stack([target_token, source_token, word], axis=1).astype(np.int32)


def _checked(example: dict[str, Any]) -> Int[np.ndarray, "links 2"]:
    """Its links, all of which are between words that it has."""
    links = np.asarray(example["links"]).reshape(-1, 2)
    for side, column in (("source", links[:, 0]), ("target", links[:, 1])):
        count = len(example[f"{side}_spans"])
        if len(wrong := column[(column < 0) | (column >= count)]):
            raise DataError(
                f"example {example.get('id')} links word {wrong[0]} of its {side}, which has {count}; "
                "words are counted from 0"
            )
    return links


def encode_links(
    source: Sequence[dict[str, Any]],
    kept: Int[np.ndarray, " pairs"],
    tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    *,
    source_len: int,
    target_len: int,
    share: float,
    seed: int,
) -> TokenLinks:
    """Links of the examples `kept`, of a share of those that have any.

    Args:
        share: above 0, at most 1; which examples these are follows from the seed alone, and a
            larger share holds those of a smaller one.

    Raises:
        DataError: the share is out of range, or the data has no links.
    """
    linked = [i for i in range(len(source)) if len(source[i].get("links", ()))]
    known = np.isin(kept, choose_linked(np.array(linked, np.int64), share, seed))
    rows = []
    for index, given in zip(kept.tolist(), known.tolist(), strict=True):
        table = np.zeros((0, 4), np.int32)
        if given:
            lengths = source_len, target_len
            table = links_in_batches(source[index], tokenizer, target_tokenizer, *lengths)
        rows.append(table)
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return TokenLinks(np.concatenate(rows), offsets, known)


def choose_linked(
    linked: Int[np.ndarray, " linked"], share: float, seed: int
) -> Int[np.ndarray, " some"]:
    """Those of the examples with links, by their indices, whose links are used.

    Raises:
        DataError: the share is out of range, or there are none.
    """
    if not 0.0 < share <= 1.0:
        raise DataError(f"the share of gold links is {share}; expected above 0 and at most 1")
    if not len(linked):
        raise DataError("the training data has no gold links between words")
    order = np.random.default_rng([seed % 2**32, 1]).permutation(linked)
    return order[: max(round(share * len(linked)), 1)]


def links_in_batches(
    example: dict[str, Any],
    tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    source_len: int,
    target_len: int,
) -> Int[np.ndarray, "links 4"]:
    """The rows of one example in the table of `TokenLinks`.

    Raises:
        DataError: a link is of a word that there is not.
    """
    return _ranked(token_links(example, tokenizer, target_tokenizer, source_len, target_len))


def _ranked(links: Int[np.ndarray, "links 3"]) -> Int[np.ndarray, "kept 4"]:
    """Sorted links with the place of BOS counted and each one's number under its target token."""
    target, source, word = links.T
    rank = np.arange(len(links)) - np.searchsorted(target, target)
    table = np.stack([target + 1, rank, source, word], axis=1).astype(np.int32)
    return table[rank < LINKS_PER_TOKEN]
