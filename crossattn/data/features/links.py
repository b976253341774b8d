"""Gold alignments of words, as links between the tokens of a source and a target.

A token of a word is linked with every token of the words that its word is aligned with; a token of a
word without a partner, such as punctuation, with the source's end, the empty word of IBM's models. The link
is kept under the place at which the decoder reads the target token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.errors import DataError
from crossattn.data.features.base import Feature
from crossattn.data.features.text import Text
from crossattn.data.packing import Batch, Layout
from crossattn.data.words import words_of_tokens

# Of 228,000 Greek-English tokens 5 have more: idioms linked as a whole, of which these are a part.
LINKS_PER_TOKEN = 16


@dataclass(frozen=True)
class Links(Feature):
    """Alignments between the words of the features "source" and "target", in whose rows they stand.

    A value is an example with "source", "target", and where its alignments are known "source_spans",
    "target_spans" and "links". Prepared it is the flat numbers of a table: a row with the places of the
    target in the decoder, then rows of (place in the decoder's input, number of the link at that place,
    source token, its word); nothing where the alignments are not known. Batches hold, int32,

        target_linked [rows, length]: 1 where the alignments of the example are known
        target_links [rows, length, LINKS_PER_TOKEN]: for each token that target_in holds, the places of its
            source tokens in the row of source; the rest is -1
        linked_words [rows, length of source]: the number of the word in its text of each linked source token

    Attributes:
        source, target: the features of both texts.
    """

    source: Text
    target: Text
    max_length: None = None
    extra = 0

    def __post_init__(self):
        for side in (self.source, self.target):
            if side.tokenizer.frame.before:
                raise DataError(
                    "links of words count a text's tokens from its first; expected tokenizers that put none "
                    "before a text."
                )

    @property
    def largest(self) -> int:
        """The greatest number in a table."""
        return max(self.source.max_length, self.target.max_length)

    def prepare(self, value: Mapping[str, Any]) -> Int[np.ndarray, " numbers"]:
        """Returns the numbers of the table of an example; DataError where a linked word is missing."""
        if not len(value.get("links", ())):
            return np.zeros(0, np.int32)
        links = token_links(value, self.source, self.target)
        target, source, word = links.T
        # The decoder reads BOS first.
        rank = np.arange(len(links)) - np.searchsorted(target, target)
        table = np.stack([target + 1, rank, source, word], 1)[rank < LINKS_PER_TOKEN]
        places = len(self.target.framed(self.target.tokenizer.encode(value["target"]))) - 1
        return np.append([places, 0, 0, 0], table).astype(np.int32)

    def prepare_many(
        self, values: Sequence[Any]
    ) -> tuple[list[np.ndarray], Int[np.ndarray, " values"]]:
        """Returns the numbers of many tables, and how many they are."""
        tables = [self.prepare(value) for value in values]
        return tables, np.array([len(table) for table in tables], np.int64)

    def collate(self, name: str, layout: Layout, values: Sequence[np.ndarray]) -> Batch:
        targets = layout.rows, layout.widths["target"]
        linked, places = np.zeros(targets, np.int32), np.full((*targets, LINKS_PER_TOKEN), -1)
        words = np.zeros((layout.rows, layout.widths["source"]), np.int32)
        starts = (layout.starts[side].tolist() for side in ("source", "target"))
        for value, row, source, target in zip(values, layout.row.tolist(), *starts, strict=True):
            if len(value):
                (length, *_), *_ = table = value.reshape(-1, 4).astype(np.int32)
                token, rank, place, word = table[1:].T
                places[row, target + token, rank] = source + place
                words[row, source + place] = word
                linked[row, target : target + length] = 1
        return {
            "target_linked": linked,
            "target_links": places.astype(np.int32),
            "linked_words": words,
        }


def token_links(
    example: Mapping[str, Any], source_text: Text, target_text: Text
) -> Int[np.ndarray, "links 3"]:
    """Returns (target token, source token, its word) of every pair of tokens with linked words, in order.

    Tokens of a target word without links get one with the source's end, a word of its own whose place is that
    of EOS. The lengths cut as they cut the tokens: the source keeps its EOS, the decoder reads BOS first.

    Raises:
        DataError: a linked word is missing.
    """
    words = []
    for side, text in (("target", target_text), ("source", source_text)):
        _, spans = text.tokenizer.encode_with_spans(example[side])
        words.append(words_of_tokens(spans[: text.max_length - 1], example[f"{side}_spans"]))
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


def _checked(example: Mapping[str, Any]) -> Int[np.ndarray, "links 2"]:
    """Returns the links of an example, which are between words that it has."""
    links = np.asarray(example["links"]).reshape(-1, 2)
    for side, column in (("source", links[:, 0]), ("target", links[:, 1])):
        count = len(example[f"{side}_spans"])
        if len(wrong := column[(column < 0) | (column >= count)]):
            raise DataError(
                f"example {example.get('id')} links word {wrong[0]} of its {side}, which has {count}; "
                "words are counted from 0"
            )
    return links
