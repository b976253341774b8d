"""Word alignment from attention, and its scores against human links.

Attention is between sub-word tokens, human links are between words: ``word_weights`` converts. A ``Recipe``
names the attention to read; it is chosen on validation data and stated with the score.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float, Int

Links = Iterable[tuple[int, int]]
Phrases = Sequence[tuple[set[int], set[int]]]
"""Words (or tokens) of the source and of the target of each phrase."""

SYMMETRISE = ("none", "union", "intersection", "grow-diag", "grow-diag-final")
PATHS = ("argmax", "viterbi", "transport")
JUMP = 0.3
"""The cost of a jump on a path by a word, in nats; the next word costs nothing."""
ROW_OFFSETS = (0, 1, 2)
"""Rows of attention of a token, counted from the one that predicts it."""


@dataclass(frozen=True)
class Recipe:
    """Reading of links from cross-attention weights [L N T S].

    Attributes:
      layer: decoder layer, counted from 0, negative from the last, or None for the mean of all.
      head: head, or None for the mean of all.
      row_offset: the row of a token. 0 predicts it, 1 has it as input (Chen et al. 2020, "Accurate word
        alignment induction from neural MT"), 2 has read the next token as well, such as the noun after
        "the"; the last token of a text has no such row, and no attention.
      unlinked: do not link a target word that attends more to positions outside every word (the end of
        the source) than to any word.
      threshold: do not link a source word to which no target word attends this much, when symmetrising: a
        word that the translation omits.
      symmetrise: "none" links each target word to its most attended source word; "union" and
        "intersection" combine that with each source word's most attending target word, and
        "grow-diag" grows the intersection along neighbours within the union (Koehn et al. 2003);
        "grow-diag-final" then adds links of the union for words that have none.
      path: "argmax" links each word by itself; "viterbi" takes the likeliest path through all words, on which
        a jump costs; "transport" takes each word's greatest part of a plan in which every word of a side
        moves the same mass.
    """

    layer: int | None = -1
    head: int | None = None
    row_offset: Annotated[int, "[0, 2]"] = 0
    symmetrise: Literal["none", "union", "intersection", "grow-diag", "grow-diag-final"] = "none"
    unlinked: bool = False
    threshold: Annotated[float, "[0, 1]"] = 0.0
    path: Literal["argmax", "viterbi", "transport"] = "argmax"

    def __post_init__(self):
        if self.row_offset not in ROW_OFFSETS:
            raise ValueError(f"row_offset is {self.row_offset!r}; expected 0, 1 or 2.")
        if self.symmetrise not in SYMMETRISE:
            raise ValueError(
                f"symmetrise is {self.symmetrise!r}; expected one of {', '.join(SYMMETRISE)}."
            )
        if self.path not in PATHS:
            raise ValueError(f"path is {self.path!r}; expected one of {', '.join(PATHS)}.")

    def __str__(self) -> str:
        head = "all heads" if self.head is None else f"head {self.head}"
        joined = "not symmetrised" if self.symmetrise == "none" else self.symmetrise
        alone = ", words may stay unlinked" if self.unlinked else ""
        below = f", source words below {self.threshold:g} stay so" if self.threshold else ""
        layer = "all layers" if self.layer is None else f"layer {self.layer}"
        by = "" if self.path == "argmax" else f", by {self.path}"
        return f"{layer}, {head}, row offset {self.row_offset}, {joined}{alone}{below}{by}"

    def token_weights(
        self, weights: Float[np.ndarray, "L N T S"], tokens: int
    ) -> Float[np.ndarray, "tokens S"]:
        """Returns a row for each of the first ``tokens`` target tokens, 0 for those that have none.

        Offset 1 needs one row more than there are tokens, that of end-of-sentence.
        """
        chosen = weights.mean(0) if self.layer is None else weights[self.layer]
        chosen = chosen.mean(0) if self.head is None else chosen[self.head]
        rows = chosen[self.row_offset : self.row_offset + tokens]
        return np.pad(rows, ((0, tokens - len(rows)), (0, 0)))

    def links(self, matrix: Float[np.ndarray, "target source"]) -> set[tuple[int, int]]:
        """Returns (source word, target word) pairs of a word matrix."""
        if self.unlinked:
            outside = 1.0 - matrix.sum(1, keepdims=True)
            matrix = np.where(matrix.max(1, keepdims=True) > outside, matrix, 0.0)
        if not matrix.any():
            return set()
        weights = transport(matrix) if self.path == "transport" else matrix
        choice = viterbi if self.path == "viterbi" else lambda rows: rows.argmax(1)
        forward = {(int(s), t) for t, s in enumerate(choice(weights)) if matrix[t].any()}
        if self.symmetrise == "none":
            return forward
        most = matrix.max(0)
        chosen = (most > 0) & (most >= self.threshold)
        backward = {(s, int(t)) for s, t in enumerate(choice(weights.T)) if chosen[s]}
        return symmetrised(forward, backward, self.symmetrise)


def word_weights(
    weights: Float[np.ndarray, "T S"],
    target_words: Int[np.ndarray, " T"],
    source_words: Int[np.ndarray, " S"],
    shape: tuple[int, int],
) -> Float[np.ndarray, "target source"]:
    """Converts attention to words: mean over a target word's tokens, sum over a source word's.

    Args:
      weights: a row for each target token, a column for each source token.
      target_words, source_words: the word of each token, -1 for none.
      shape: number of target words and of source words.
    """
    rows = target_words[:, None] == np.arange(shape[0])
    columns = source_words[:, None] == np.arange(shape[1])
    tokens = np.maximum(rows.sum(0), 1)
    return (rows.T @ weights @ columns) / tokens[:, None]


def viterbi(
    matrix: Float[np.ndarray, "rows columns"], jump: float = JUMP
) -> Int[np.ndarray, " rows"]:
    """Returns the column of each row on the path of the greatest sum of log weights less costs of jumps.

    A step from column i to column j costs ``jump * |j - i - 1|``. Rows of zeros say nothing of
    columns, but a path pays for jumps there too.
    Source: Vogel, Ney and Tillmann 1996, "HMM-based word alignment in statistical translation".
    """
    scores = np.log(np.maximum(matrix, 1e-9))
    scores[~matrix.any(1)] = 0.0
    columns = np.arange(matrix.shape[1])
    costs = jump * np.abs(columns - columns[:, None] - 1)  # [from, to]
    total, back = scores[0], []
    for row in scores[1:]:
        reached = total[:, None] - costs
        back.append(reached.argmax(0))
        total = reached.max(0) + row
    path = [int(total.argmax())]
    for came in reversed(back):
        path.append(int(came[path[-1]]))
    return np.array(path[::-1])


def transport(
    matrix: Float[np.ndarray, "rows columns"], rounds: int = 50
) -> Float[np.ndarray, "rows columns"]:
    """Returns the plan that moves the same mass from every row and to every column, nearest to the weights.

    It is nearest in relative entropy, by Sinkhorn's rounds. Rows and columns of zeros move nothing.
    Source: Cuturi 2013, with costs of minus log weights and a temperature of 1.
    """
    plan = np.asarray(matrix, np.float64)
    # Without a little everywhere there may be no such plan.
    plan = np.where(plan.any(1, keepdims=True) & plan.any(0), np.maximum(plan, 1e-9), 0.0)
    rows, columns = plan.any(1), plan.any(0)
    for _ in range(rounds):
        plan = plan / np.maximum(plan.sum(1, keepdims=True), 1e-300) / max(rows.sum(), 1)
        plan = plan / np.maximum(plan.sum(0), 1e-300) / max(columns.sum(), 1)
    return plan


def symmetrised(forward: Links, backward: Links, method: str) -> set[tuple[int, int]]:
    """Combines the links of two directions. Source: Koehn, Och and Marcu 2003; Och and Ney 2003."""
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
    if method == "grow-diag-final":
        for own in (forward, backward):
            for source, target in sorted(own - grown):
                linked = any(s == source for s, _ in grown), any(t == target for _, t in grown)
                if not all(linked):
                    grown.add((source, target))
    return grown


def alignment_scores(
    predicted: Sequence[set[tuple[int, int]]], gold: Sequence[set[tuple[int, int]]]
) -> dict[str, float]:
    """Computes AER, precision and recall of a corpus in percent, with all gold links sure.

    ``AER = 1 - 2 |A and G| / (|A| + |G|)``.

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


def phrase_counts(links: Links, phrases: Phrases) -> Int[np.ndarray, " 4"]:
    """Counts links inside phrases and links that touch one, then words with a link inside, and all words.

    A link is inside a phrase with both ends, and touches it with one or both.
    """
    counts, links = np.zeros(4, int), set(links)
    for source, target in phrases:
        touching = {(s, t) for s, t in links if s in source or t in target}
        inside = {(s, t) for s, t in touching if s in source and t in target}
        covered = len({s for s, _ in inside}) + len({t for _, t in inside})
        counts += len(inside), len(touching), covered, len(source) + len(target)
    return counts


def phrase_scores(predicted: Sequence[Links], phrases: Sequence[Phrases]) -> dict[str, float]:
    """Computes AER, precision and recall of a corpus in percent, against links of phrases.

    A link inside a phrase is possible, and it is sure that each word of a phrase has one:
    ``AER = 1 - (inside + covered) / (touching + words)`` of ``phrase_counts``.

    Raises:
      ValueError: the two lists differ in length.
    Source: Och and Ney 2003, section 6.
    """
    if len(predicted) != len(phrases):
        raise ValueError(f"predicted has {len(predicted)} sentences and phrases {len(phrases)}.")
    counts = [phrase_counts(links, own) for links, own in zip(predicted, phrases, strict=True)]
    inside, touching, covered, words = np.sum([np.zeros(4, int), *counts], 0).tolist()
    return {
        "aer": 100.0 * (1.0 - (inside + covered) / max(touching + words, 1)),
        "precision": 100.0 * inside / max(touching, 1),
        "recall": 100.0 * covered / max(words, 1),
    }


def anchors(source_words: Sequence[str], target_words: Sequence[str]) -> set[tuple[int, int]]:
    """Returns near-certain links: words of two characters or more that occur once, alike, on either side."""

    def unique(words: Sequence[str]) -> dict[str, int]:
        return {w: i for i, w in enumerate(words) if len(w) > 1 and words.count(w) == 1}

    source, target = unique(list(source_words)), unique(list(target_words))
    return {(source[word], target[word]) for word in source.keys() & target.keys()}
