"""IBM model 1: the probability of a target word given a source word, counted on sentence pairs.

Source: Brown et al. 1993, "The mathematics of statistical machine translation", section 4.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from jaxtyping import Float, Int

Pair = tuple[Sequence[str], Sequence[str]]


@dataclass
class Model1:
    """Probabilities of the pairs of words that occur together.

    Attributes:
      sources, targets: numbers of the words; "", the empty word, is source word 0.
      kinds: for each sentence pair the number of each (target word, source word), the empty word first,
        [T, 1 + S].
      source_of, target_of: the words of each number.
      p: its probability.
    """

    sources: dict[str, int]
    targets: dict[str, int]
    kinds: list[Int[np.ndarray, "T S1"]]
    source_of: Int[np.ndarray, " kinds"]
    target_of: Int[np.ndarray, " kinds"]
    p: Float[np.ndarray, " kinds"]

    @classmethod
    def of(cls, pairs: Sequence[Pair], rounds: int) -> Self:
        """Returns what so many rounds of expectation maximisation find from equal probabilities."""
        sources: dict[str, int] = {"": 0}
        targets: dict[str, int] = {}
        keys = []
        for source, target in pairs:
            s = np.array([0, *(sources.setdefault(w, len(sources)) for w in source)], np.int64)
            t = np.array([targets.setdefault(w, len(targets)) for w in target], np.int64)
            keys.append((s << 32) + t[:, None])
        known, numbers = np.unique(np.concatenate([x.ravel() for x in keys]), return_inverse=True)
        ends = np.cumsum([x.size for x in keys])[:-1]
        kinds = [n.reshape(x.shape) for n, x in zip(np.split(numbers, ends), keys, strict=True)]
        found = cls(sources, targets, kinds, known >> 32, known & 0xFFFFFFFF, np.ones(len(known)))
        for _ in range(rounds):
            found.learn([found.p[n] / found.p[n].sum(1, keepdims=True) for n in kinds])
        return found

    def chances(self, pair: Pair) -> Float[np.ndarray, "T S1"]:
        """Returns the probability of each target word given the empty word and each source word.

        A source word that was in no pair counts as the empty word, and such a target word has 0.
        """
        s = np.array([0, *(self.sources.get(word, 0) for word in pair[0])], np.int64)
        t = np.array([self.targets.get(word, -1) for word in pair[1]], np.int64)[:, None]
        wanted = (s << 32) + t
        at = np.minimum(np.searchsorted(self._known, wanted), len(self._known) - 1)
        return np.where((self._known[at] == wanted) & (t >= 0), self.p[at], 0.0)

    @cached_property
    def _known(self) -> Int[np.ndarray, " kinds"]:
        return (self.source_of << 32) + self.target_of

    def learn(self, shares: Sequence[Float[np.ndarray, "T S1"]]) -> None:
        """Sets the probabilities from the share that each source word has in each target word."""
        flat = np.concatenate([x.ravel() for x in self.kinds])
        counts = np.bincount(flat, np.concatenate([x.ravel() for x in shares]), len(self.p))
        totals = np.bincount(self.source_of, counts)[self.source_of]
        self.p = counts / np.maximum(totals, 1e-300)
