"""Word alignment from attention, and how far it is from human links.

Attention is between sub-word tokens, human links are between words: ``word_weights`` sums one into
the other. ``Recipe`` says which attention to read; it is chosen on validation data and stated with
the score.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float, Int

Links = Iterable[tuple[int, int]]

ROW_OFFSETS = (0, 1, 2)
"""How many steps after the one that predicts a token its row of attention may be."""


@dataclass(frozen=True)
class Recipe:
    """How links are read off cross-attention weights [L N T S].

    Attributes:
      layer: decoder layer, counted from 0, negative from the last.
      head: head, or None for the mean of the layer's heads.
      row_offset: which row of attention is a token's. 0 is the row that predicts it, 1 the row whose input
        it is (Chen et al. 2020, "Accurate word alignment induction from neural MT"), 2 the row after
        that, which has read the following token as well: what "the" belongs to is known then. The
        last token of a text has no such row and stays without attention.
      unlinked: leave a target word alone that attends more to what is outside every word (the end
        of the source) than to any word; False links every word.
      threshold: leave a source word alone to which no target word attends this much. A word that the
        translation leaves out is the choice of some target word even so. Matters where links are
        symmetrised.
      symmetrise: "none" links each target word to its most attended source word; "union" and
        "intersection" combine that with each source word's most attending target word, and
        "grow-diag" grows the intersection along neighbours within the union (Koehn et al. 2003).
    """

    layer: int = -1
    head: int | None = None
    row_offset: Annotated[int, "[0, 2]"] = 0
    symmetrise: Literal["none", "union", "intersection", "grow-diag"] = "none"
    unlinked: bool = False
    threshold: Annotated[float, "[0, 1]"] = 0.0

    def __post_init__(self):
        if self.row_offset not in ROW_OFFSETS:
            raise ValueError(f"row_offset is {self.row_offset!r}; expected 0, 1 or 2.")
        if self.symmetrise not in ("none", "union", "intersection", "grow-diag"):
            raise ValueError(
                f"symmetrise is {self.symmetrise!r}; expected none, union, intersection or grow-diag."
            )

    def __str__(self) -> str:
        head = "all heads" if self.head is None else f"head {self.head}"
        joined = "not symmetrised" if self.symmetrise == "none" else self.symmetrise
        alone = ", words may stay unlinked" if self.unlinked else ""
        below = f", source words below {self.threshold:g} stay so" if self.threshold else ""
        return f"layer {self.layer}, {head}, row offset {self.row_offset}, {joined}{alone}{below}"

    def token_weights(
        self, weights: Float[np.ndarray, "L N T S"], tokens: int
    ) -> Float[np.ndarray, "tokens S"]:
        """One row for each of the first ``tokens`` target tokens.

        Rows of offset 1 need one row more than there are tokens: that of end-of-sentence.
        """
        chosen = weights[self.layer]
        chosen = chosen.mean(0) if self.head is None else chosen[self.head]
        rows = chosen[self.row_offset : self.row_offset + tokens]
        if self.row_offset == 2 and len(rows) < tokens:
            rows = np.concatenate([rows, np.zeros_like(chosen[:1])])
        return rows

    def links(self, matrix: Float[np.ndarray, "target source"]) -> set[tuple[int, int]]:
        """(source word, target word) pairs from a word matrix."""
        if self.unlinked:
            outside = 1.0 - matrix.sum(1, keepdims=True)
            matrix = np.where(matrix.max(1, keepdims=True) > outside, matrix, 0.0)
        forward = {(int(s), t) for t, s in enumerate(matrix.argmax(1)) if matrix[t].any()}
        if self.symmetrise == "none":
            return forward
        # A source word's rivals are compared by share of each target word's attention.
        most = matrix.max(0)
        chosen = (most > 0) & (most >= self.threshold)
        backward = {(s, int(t)) for s, t in enumerate(matrix.argmax(0)) if chosen[s]}
        return symmetrised(forward, backward, self.symmetrise)


def word_weights(
    weights: Float[np.ndarray, "T S"],
    target_words: Int[np.ndarray, " T"],
    source_words: Int[np.ndarray, " S"],
    shape: tuple[int, int],
) -> Float[np.ndarray, "target source"]:
    """Attention between words: mean over a target word's tokens, sum over a source word's.

    Args:
      weights: a row for each target token, a column for each source token.
      target_words, source_words: the word of each token, -1 for none.
      shape: number of target words and of source words.
    """
    rows = target_words[:, None] == np.arange(shape[0])
    columns = source_words[:, None] == np.arange(shape[1])
    tokens = np.maximum(rows.sum(0), 1)
    return (rows.T @ weights @ columns) / tokens[:, None]


def symmetrised(forward: Links, backward: Links, method: str) -> set[tuple[int, int]]:
    """Two directions' links combined. Source: Koehn, Och and Marcu 2003; Och and Ney 2003."""
    forward, backward = set(forward), set(backward)
    union, grown = forward | backward, forward & backward
    if method == "union":
        return union
    if method == "intersection":
        return grown
    neighbours = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    frontier = sorted(grown)
    while frontier:
        source, target = frontier.pop()
        for i, j in neighbours:
            new = (source + i, target + j)
            linked = any(s == new[0] for s, _ in grown), any(t == new[1] for _, t in grown)
            if new in union and new not in grown and not all(linked):
                grown.add(new)
                frontier.append(new)
    return grown


def alignment_scores(
    predicted: Sequence[set[tuple[int, int]]], gold: Sequence[set[tuple[int, int]]]
) -> dict[str, float]:
    """AER, precision and recall in percent over a corpus, every gold link counted as sure.

    Then ``AER = 1 - 2 |A and G| / (|A| + |G|)``.

    Raises:
      ValueError: the two lists differ in length.
    Source: Och and Ney 2003, section 6, with S = P.
    """
    if len(predicted) != len(gold):
        raise ValueError(f"predicted has {len(predicted)} sentences and gold {len(gold)}.")
    hits = sum(len(p & g) for p, g in zip(predicted, gold, strict=True))
    given, wanted = sum(map(len, predicted)), sum(map(len, gold))
    return {
        "aer": 100.0 * (1.0 - 2.0 * hits / max(given + wanted, 1)),
        "precision": 100.0 * hits / max(given, 1),
        "recall": 100.0 * hits / max(wanted, 1),
    }


def anchors(source_words: Sequence[str], target_words: Sequence[str]) -> set[tuple[int, int]]:
    """Near-certain links without human annotation: words spelt alike, once on either side.

    Names, numbers and commands that a translation keeps. Single characters do not count.
    """

    def unique(words: Sequence[str]) -> dict[str, int]:
        return {w: i for i, w in enumerate(words) if len(w) > 1 and words.count(w) == 1}

    source, target = unique(list(source_words)), unique(list(target_words))
    return {(source[word], target[word]) for word in source.keys() & target.keys()}
