"""Word alignment without attention: a hidden Markov model in each direction, trained to agree.

A target word is written by a source word, or by the empty word, and the source position moves by a jump
from word to word (Vogel, Ney and Tillmann 1996). Both directions learn from the product of their posteriors
(Liang, Taskar and Klein 2006, "Alignment by agreement"). Words count by their first letters, without case and
accents, since an inflected language has few of each form.
"""

import itertools
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from crossattn.data.words import word_spans
from experiments.tasks.model_1 import Model1, Pair

Example = Mapping[str, Any]
Posteriors = tuple[Float[np.ndarray, "T S"], Float[np.ndarray, "S T"]]

LETTERS, ROUNDS, EMPTY, FURTHEST = 5, 3, 0.1, 60
"""Letters of a word that count, rounds of training of each model, share of the empty word, longest jump."""
PADDING = 1.0 / EMPTY
"""A probability of the empty word, beside 0 of all others, that keeps every position as likely as it was."""
THRESHOLD, REACH = 0.3, 2
"""How links are read off posteriors; best on validation verses of Greek-English."""
_TOGETHER = 1_000_000  # numbers of the matrices of sentence pairs that are read together
_AT_ONCE = 500  # pairs whose chances are looked up together


def stem(word: str) -> str:
    """Returns the first letters of a word, without case and accents."""
    letters = unicodedata.normalize("NFD", word.casefold())
    return "".join(each for each in letters if not unicodedata.combining(each))[:LETTERS]


def posteriors(
    emissions: Float[np.ndarray, "B T own"], jumps: Float[np.ndarray, " jumps"]
) -> Float[np.ndarray, "B T S"]:
    """Returns the probability that each target word is written by each source word, [B T S].

    Args:
      emissions: of sentence pairs with as many source words, probabilities of the target words given the
        empty word, then given each source word; ``PADDING`` after the end of a target.
      jumps: weights of jumps by -FURTHEST to FURTHEST positions; farther ones count as these.
    """
    empty, own, moves = parts = _parts_of(emissions, jumps)
    wrote, kept, scales = _forward(*parts)
    after = np.ones_like(own)
    for t in range(own.shape[1] - 1, 0, -1):
        ahead = (own[:, t] * after[:, t]) @ moves.T + empty[:, t] * after[:, t]
        after[:, t - 1] = ahead / scales[:, t]
    every = ((wrote + kept) * after).sum(-1, keepdims=True)
    return wrote * after / np.maximum(every, 1e-300)


def predictive(
    emissions: Float[np.ndarray, "B T own"], jumps: Float[np.ndarray, " jumps"]
) -> Float[np.ndarray, "B T"]:
    """Returns the probability of each target word given the source and the target words before it.

    Args:
      emissions, jumps: as of ``posteriors``.
    """
    if emissions.shape[2] == 1:  # no source word
        return emissions[..., 0]
    return _forward(*_parts_of(emissions, jumps))[2][..., 0]


def _parts_of(emissions: np.ndarray, jumps: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the chances of the empty word, those of the source words, and the moves between these."""
    empty, own = EMPTY * emissions[..., :1], emissions[..., 1:]
    moves = jumps[_distances(own.shape[2])]
    return empty, own, (1.0 - EMPTY) * moves / moves.sum(1, keepdims=True)


def _forward(empty: np.ndarray, own: np.ndarray, moves: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the forward chances of states that wrote a word and that kept their place, and their sums."""
    B, T, S = own.shape
    # The empty word keeps the position, so that a state is a position and whether it wrote the word.
    wrote, kept, scales = np.ones_like(own), np.ones_like(own), np.ones((B, T, 1))
    at = np.full((B, S), 1.0 / max(S, 1))
    for t in range(T):
        wrote[:, t] = (at @ moves if t else at * (1.0 - EMPTY)) * own[:, t]
        kept[:, t] = at * empty[:, t]
        both = wrote[:, t] + kept[:, t]
        scales[:, t] = np.maximum(both.sum(-1, keepdims=True), 1e-300)
        at = both / scales[:, t]
    return wrote, kept, scales


def _distances(S: int) -> Int[np.ndarray, "S S"]:
    places = np.arange(S)
    return np.clip(places - places[:, None], -FURTHEST, FURTHEST) + FURTHEST


class _Direction:
    """An HMM in one direction: a model 1, and weights of jumps."""

    def __init__(self, pairs: Sequence[Pair]):
        self.words = Model1.of(pairs, rounds=5)
        self.jumps = np.exp(-0.3 * np.abs(np.arange(-FURTHEST, FURTHEST + 1) - 1))

    def read(self) -> list[np.ndarray]:
        """Returns the posteriors [T S] of each sentence pair."""
        kinds, p = self.words.kinds, self.words.p
        return self._each(posteriors, [n.shape for n in kinds], lambda i: p[kinds[i]])

    def predictions(self, pairs: Sequence[Pair]) -> list[np.ndarray]:
        """Returns the ``predictive`` probabilities [T] of other sentence pairs."""
        found = []
        for first in range(0, len(pairs), _AT_ONCE):
            some = [self.words.chances(pair) for pair in pairs[first : first + _AT_ONCE]]
            found += self._each(predictive, [x.shape for x in some], some.__getitem__)
        return found

    def _each(
        self,
        function: Any,
        shapes: Sequence[tuple[int, ...]],
        chances: Callable[[int], np.ndarray],
    ) -> list[np.ndarray]:
        # Pairs with as many source words are read together, of like targets.
        order = sorted(range(len(shapes)), key=lambda i: shapes[i][::-1])
        found = [np.zeros(0)] * len(order)
        for own, group in itertools.groupby(order, key=lambda i: shapes[i][1]):
            for some in _parts([*group], shapes):
                emissions = np.zeros((len(some), shapes[some[-1]][0], own))
                emissions[..., 0] = PADDING
                for row, i in enumerate(some):
                    emissions[row, : shapes[i][0]] = chances(i)
                for i, each in zip(some, function(emissions, self.jumps), strict=True):
                    found[i] = each[: shapes[i][0]]
        return found

    def learn_links(self, links: Sequence[np.ndarray]) -> None:
        """Sets probabilities and jumps from posteriors [T S]; what they lack of 1 is of the empty word."""
        empty = [np.maximum(1.0 - x.sum(1, keepdims=True), 0.0) for x in links]
        self.words.learn([np.concatenate(each, 1) for each in zip(empty, links, strict=True)])
        by_length: dict[int, list[np.ndarray]] = {}
        for x in links:
            # A row of zeros parts a pair from the next one.
            by_length.setdefault(x.shape[1], []).extend((x, np.zeros((1, x.shape[1]))))
        jumps = np.zeros_like(self.jumps)
        for S, own in by_length.items():
            rows = np.concatenate(own)
            np.add.at(jumps, _distances(S), rows[:-1].T @ rows[1:])
        self.jumps = jumps + 1e-3 * jumps.sum() / len(jumps) + 1e-9


def _parts(group: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> Iterator[Sequence[int]]:
    """Splits pairs, sorted by their targets' lengths, so that the matrices of a part are not too large."""
    start = 0
    for end in range(1, len(group) + 1):
        if end == len(group) or (end + 1 - start) * math.prod(shapes[group[end]]) > _TOGETHER:
            yield group[start:end]
            start = end


def align(pairs: Sequence[Pair], rounds: int = ROUNDS) -> list[Posteriors]:
    """Returns the posteriors of both directions for each pair of words, learnt from the pairs alone."""
    stems = [([stem(w) for w in source], [stem(w) for w in target]) for source, target in pairs]
    there, back = _Direction(stems), _Direction([(t, s) for s, t in stems])
    for _ in range(rounds):
        agreed = [x * y.T for x, y in zip(there.read(), back.read(), strict=True)]
        there.learn_links(agreed)
        back.learn_links([x.T for x in agreed])
    return list(zip(there.read(), back.read(), strict=True))


def predictions(
    train: Sequence[Pair], other: Sequence[Pair], rounds: int = ROUNDS
) -> list[Float[np.ndarray, " T"]]:
    """Returns the probability of each target word given the source and the target words before it.

    The model learns from the training pairs alone. A source word that they lack counts as the empty word.
    """
    model = _Direction(train)
    for _ in range(rounds):
        model.learn_links(model.read())
    return model.predictions(other)


def linked(
    examples: Sequence[Example], threshold: float = THRESHOLD, reach: int = REACH
) -> list[dict[str, Any]]:
    """Returns the examples with ``links`` that are counted on their texts, in place of their own."""
    spans = [word_spans_of(example) for example in examples]
    pairs = [_texts(*each) for each in zip(examples, spans, strict=True)]
    found = (links(*each, threshold, reach) for each in zip(align(pairs), pairs, strict=True))
    return [
        {
            **example,
            "source_spans": source,
            "target_spans": target,
            "links": np.array(sorted(own), np.int32).reshape(-1, 2),
        }
        for example, (source, target), own in zip(examples, spans, found, strict=True)
    ]


def words_of(example: Example) -> tuple[list[str], list[str]]:
    """Returns the words of both sides of an example."""
    return _texts(example, word_spans_of(example))


def word_spans_of(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Returns the spans of the words of both sides, the example's own where it has them."""
    source, target = (
        np.asarray(
            example[f"{side}_spans"] if f"{side}_spans" in example else word_spans(example[side])
        ).reshape(-1, 2)
        for side in ("source", "target")
    )
    return source, target


def _texts(example: Example, spans: Sequence[np.ndarray]) -> tuple[list[str], list[str]]:
    source, target = (
        [example[side][start:end] for start, end in own.tolist()]
        for side, own in zip(("source", "target"), spans, strict=True)
    )
    return source, target


def links(found: Posteriors, pair: Pair, threshold: float, reach: int = 0) -> set[tuple[int, int]]:
    """Returns links (source, target) whose two posteriors have a geometric mean above a threshold.

    Args:
      found: the posteriors of the pair.
      pair: its words.
      threshold: of the mean.
      reach: a target word with letters and no link takes those of the next word that has one, if that is at
        most so many words on: articles and prepositions go with their noun.
    """
    target, source = np.nonzero(np.sqrt(found[0] * found[1].T) > threshold)
    sure = {(int(s), int(t)) for s, t in zip(source, target, strict=True)}
    linked = {t for _, t in sure}
    more = set()
    for t, word in enumerate(pair[1]):
        if t not in linked and any(map(str.isalnum, word)):
            next_ = next((u for u in range(t + 1, t + reach + 1) if u in linked), None)
            more |= {(s, t) for s, u in sure if u == next_}
    return sure | more
