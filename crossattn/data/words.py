"""Words of tokens, by spans (start, end) in characters of the text."""

import unicodedata

import numpy as np
from jaxtyping import Int


def words_of_tokens(
    token_spans: Int[np.ndarray, "tokens 2"], word_spans: Int[np.ndarray, "words 2"]
) -> Int[np.ndarray, " tokens"]:
    """Returns the index of the word of each token, -1 outside every word or without characters.

    A token that reaches over several words belongs to the one with most of its characters, the
    first in a tie. Word spans are in text order and disjoint.
    """
    token_spans = np.asarray(token_spans).reshape(-1, 2)
    word_spans = np.asarray(word_spans).reshape(-1, 2)
    if not len(token_spans) or not len(word_spans):
        return np.full(len(token_spans), -1, np.int32)
    starts = np.maximum(token_spans[:, None, 0], word_spans[None, :, 0])
    ends = np.minimum(token_spans[:, None, 1], word_spans[None, :, 1])
    shared = ends - starts  # characters that token and word have in common
    best = shared.argmax(axis=1)
    outside = shared[np.arange(len(best)), best] <= 0
    return np.where(outside, -1, best).astype(np.int32)


def word_spans(text: str) -> Int[np.ndarray, "words 2"]:
    """Returns the spans of the words of any text: runs of letters, marks and digits; punctuation singly."""
    spans: list[tuple[int, int]] = []
    inside = False
    for index, character in enumerate(text):
        wordlike = unicodedata.category(character)[0] in "LMN"
        if wordlike and inside:
            spans[-1] = (spans[-1][0], index + 1)
        elif not character.isspace():
            spans.append((index, index + 1))
        inside = wordlike
    return np.array(spans, np.int32).reshape(-1, 2)
