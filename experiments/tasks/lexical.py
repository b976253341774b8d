"""Baselines of translation and alignment that count words: IBM model 1, an HMM, and the diagonal."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossattn.train.alignment import alignment_scores, symmetrised
from experiments.tasks import hmm
from experiments.tasks.hmm import words_of
from experiments.tasks.model_1 import Model1, Pair

Example = dict[str, Any]
Links = set[tuple[int, int]]

_ROUNDS = 10
_THRESHOLDS, _REACHES = (0.1, 0.2, 0.3, 0.4), (0, 1, 2, 3)
_METHODS = ("none", "intersection", "union", "grow-diag")


@dataclass(frozen=True)
class WordModel:
    """Probabilities of target words given a source word, of pairs that occur together.

    Attributes:
      probabilities: by source word, "" for the empty word, and target word.
    """

    probabilities: dict[str, dict[str, float]]

    def links(self, pair: Pair) -> Links:
        """Returns the likeliest source word of each target word; none where the empty word is likelier."""
        source, target = pair
        found = set()
        for at, word in enumerate(target):
            chances = [self.probabilities.get(own, {}).get(word, 0.0) for own in ("", *source)]
            best = int(np.argmax(chances))
            if best:
                found.add((best - 1, at))
        return found

    def translation(self, source: Sequence[str]) -> str:
        """Returns the likeliest target word of each source word, in the source's order."""
        known = [self.probabilities[word] for word in source if word in self.probabilities]
        return " ".join(max(own, key=own.__getitem__) for own in known)


def ibm_model_1(pairs: Sequence[Pair], rounds: int = _ROUNDS) -> WordModel:
    """Returns the word model that model 1 finds, with an empty word."""
    model = Model1.of(pairs, rounds)
    names, words = list(model.sources), list(model.targets)
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    counted = (model.source_of.tolist(), model.target_of.tolist(), model.p.tolist())
    for source, target, chance in zip(*counted, strict=True):
        found[names[source]][words[target]] = chance
    return WordModel(found)


def diagonal(pair: Pair) -> Links:
    """Returns for each target word the source word at the same share of the way."""
    source, target = map(len, pair)
    return {(round(t * (source - 1) / max(target - 1, 1)), t) for t in range(target)}


def word_by_word(train: Sequence[Example], examples: Sequence[Example]) -> list[str]:
    """Returns the likeliest target word of each source word by model 1, in the source's order."""
    model = ibm_model_1([words_of(example) for example in train])
    return [model.translation(words_of(example)[0]) for example in examples]


def alignment_errors(examples: Callable[[str], Sequence[Example]], split: str) -> dict[str, float]:
    """Returns AER of the diagonal, of model 1 and of an HMM against the gold links of a split, as NAME_aer.

    How links of model 1 in two directions are joined is chosen on validation, and so is how those of the HMM
    are read, which learns from the texts of these splits as well. ``examples`` gives those of a split by its
    name.
    """
    train, scored, validation = (list(examples(name)) for name in ("train", split, "validation"))
    pairs = [words_of(example) for example in train]
    model, back = ibm_model_1(pairs), ibm_model_1([_turned(pair) for pair in pairs])

    def linked(own: Sequence[Example], method: str) -> list[Links]:
        return [_joined(model, back, words_of(example), method) for example in own]

    best = min(_METHODS, key=lambda method: _aer(linked(validation, method), validation))
    return {
        "diagonal_aer": _aer([diagonal(words_of(example)) for example in scored], scored),
        "ibm_model_1_aer": _aer(linked(scored, best), scored),
        "hmm_aer": _hmm_aer(pairs, validation, scored),
    }


def _hmm_aer(
    train: Sequence[Pair], validation: Sequence[Example], scored: Sequence[Example]
) -> float:
    held_out = [words_of(example) for example in (*validation, *scored)]
    found = list(zip(hmm.align([*train, *held_out])[len(train) :], held_out, strict=True))
    chosen, other = found[: len(validation)], found[len(validation) :]

    def aer(own: Sequence[Any], examples: Sequence[Example], reading: tuple[float, int]) -> float:
        return _aer([hmm.links(posteriors, pair, *reading) for posteriors, pair in own], examples)

    readings = itertools.product(_THRESHOLDS, _REACHES)
    best = min(readings, key=lambda reading: aer(chosen, validation, reading))
    return aer(other, scored, best)


def _turned(pair: Pair) -> Pair:
    return pair[1], pair[0]


def _joined(model: WordModel, back: WordModel, pair: Pair, method: str) -> Links:
    forward = model.links(pair)
    if method == "none":
        return forward
    return symmetrised(forward, {(s, t) for t, s in back.links(_turned(pair))}, method)


def _aer(found: Sequence[Links], examples: Sequence[Example]) -> float:
    gold = [{(int(s), int(t)) for s, t in example["links"]} for example in examples]
    return alignment_scores(found, gold)["aer"]
