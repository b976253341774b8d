"""Baselines of translation that count words: IBM model 1, the nearest training text, the diagonal."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossattn.data.words import word_spans
from crossattn.train.alignment import alignment_scores, symmetrised

Example = dict[str, Any]
Pair = tuple[list[str], list[str]]
Links = set[tuple[int, int]]

_ROUNDS = 10
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
    """Returns the word model that expectation maximisation finds from equal probabilities.

    It is model 1 with an empty word. Source: Brown et al. 1993, "The mathematics of statistical machine
    translation".
    """
    sources: dict[str, int] = {"": 0}
    targets: dict[str, int] = {}
    cells: list[np.ndarray] = []
    rows = 0
    for source, target in pairs:
        s = [0, *(sources.setdefault(word, len(sources)) for word in source)]
        t = [targets.setdefault(word, len(targets)) for word in target]
        row = np.arange(rows, rows + len(t))
        cells.append(np.stack([np.tile(s, len(t)), np.repeat(t, len(s)), np.repeat(row, len(s))]))
        rows += len(t)
    source, target, row = np.concatenate(cells, 1)
    kinds, cell = np.unique(source.astype(np.int64) * len(targets) + target, return_inverse=True)
    of_source = kinds // len(targets)
    p = np.ones(len(kinds))
    for _ in range(rounds):
        shares = p[cell] / np.bincount(row, p[cell], rows)[row]
        counts = np.bincount(cell, shares, len(kinds))
        p = counts / np.bincount(of_source, counts, len(sources))[of_source]
    names, words = list(sources), list(targets)
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for kind, chance in zip(kinds.tolist(), p.tolist(), strict=True):
        found[names[kind // len(words)]][words[kind % len(words)]] = chance
    return WordModel(found)


def diagonal(pair: Pair) -> Links:
    """Returns for each target word the source word at the same share of the way."""
    source, target = map(len, pair)
    return {(round(t * (source - 1) / max(target - 1, 1)), t) for t in range(target)}


def nearest(train: Sequence[Example], texts: Sequence[str]) -> list[str]:
    """Returns for each text the target of the training source with the largest cosine of words' tf-idf.

    Raises:
      ModuleNotFoundError: scikit-learn is not installed.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    known = list(train)
    vectors = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+")
    table = vectors.fit_transform([example["source"] for example in known])
    alike: Any = vectors.transform(texts) @ table.T  # of unit vectors
    return [known[row]["target"] for row in np.asarray(alike.argmax(axis=1)).ravel()]


def scores(
    examples: Callable[[str], Sequence[Example]],
    split: str,
    score: Callable[[Sequence[Example], Sequence[str]], Mapping[str, Any]],
    metrics: Sequence[str],
) -> dict[str, float]:
    """Returns metrics of translations, and AER where there are gold links, as NAME_METRIC.

    Args:
      examples: from the name of a split to its examples; how links of two directions are joined is chosen on
        validation.
      split: the one that is scored.
      score: from examples and translations to scores.
      metrics: names of those that are numbers of interest.
    """
    train, other = list(examples("train")), list(examples(split))
    model = ibm_model_1([_words(example) for example in train])
    most, _ = Counter(example["target"] for example in train).most_common(1)[0]
    written = {
        "most_frequent": [most] * len(other),
        "nearest": nearest(train, [example["source"] for example in other]),
        "word_by_word": [model.translation(_words(example)[0]) for example in other],
    }
    found = {
        f"{name}_{metric}": float(own[metric])
        for name, texts in written.items()
        for own in [score(other, texts)]
        for metric in metrics
    }
    if not all("links" in example for example in other):
        return found
    back = ibm_model_1([_turned(_words(example)) for example in train])

    def linked(own: Sequence[Example], method: str) -> list[Links]:
        return [_joined(model, back, _words(example), method) for example in own]

    validation = list(examples("validation"))
    best = min(_METHODS, key=lambda method: _aer(linked(validation, method), validation))
    return found | {
        "diagonal_aer": _aer([diagonal(_words(example)) for example in other], other),
        "ibm_model_1_aer": _aer(linked(other, best), other),
    }


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


def _words(example: Example) -> Pair:
    """Returns the words of both sides, by the example's own spans where it has them."""
    sides = []
    for side in ("source", "target"):
        text = example[side]
        spans = example.get(f"{side}_spans")
        spans = word_spans(text) if spans is None else spans
        sides.append([text[start:end] for start, end in spans])
    return sides[0], sides[1]
