"""Baselines of tasks on text: counted trigrams, and trigrams mixed with a simple reader of the source.

The reader of tokens is a hidden Markov model, or logistic regressions of the bag of tokens; that of pictures
and sounds, logistic regressions of their main axes, one for each pair of tokens before. Which one, how smooth
it is, and its share by how much these tokens leave open are chosen on the validation split.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from experiments.baselines import AXES
from experiments.tasks import hmm, ngrams

MOST_PAIRS, MOST_TEXTS = 30_000, 5_000
"""Training texts, at equal distances, that hidden Markov models and logistic regressions learn from."""
ENOUGH = 10
"""Places of a pair of tokens in training texts, from which a logistic regression is fitted."""
_SHARES = np.linspace(0.0, 1.0, 21)
_NONE = (np.zeros(0, int),) * 3

SourceOf = Callable[[Any, int, int], np.ndarray]
"""Of a batch, a row and the number of a text in it: tokens [S], or numbers that are told of a source."""


class Text(NamedTuple):
    """A target as a task reads it.

    Attributes:
      tokens: [n].
      counted: which of them count in the loss.
      source: what ``SourceOf`` gives; nothing of a text alone.
    """

    tokens: Int[np.ndarray, " n"]
    counted: Bool[np.ndarray, " n"]
    source: np.ndarray


def scores(
    task: Any,
    split: str,
    segments: Callable[[Any], Any],
    told: Callable[[Any], Any] | None = None,
    source_of: SourceOf | None = None,
) -> dict[str, float]:
    """Returns the nats per token of trigrams, and of ``trigrams_and_source``, on the targets of a split.

    Args:
      task, split: of the targets.
      segments: gives the segment of each token of ``target_out`` in a batch; 0 is no part of a target.
      told: gives the mask of the tokens that count; trigrams read the others of a target too. None is all.
      source_of: None scores trigrams alone.
    """

    def texts(name: str) -> list[Text]:
        return list(_texts(task.eval_batches(name, None), segments, told, source_of))

    train, other = texts("train"), texts(split)
    validation = texts("validation") if source_of else []
    every = [text.tokens for text in (*train, *validation, *other)]
    kinds = 1 + max(int(tokens.max(initial=0)) for tokens in every)

    def trigrams(own: Sequence[Text]) -> Float[np.ndarray, " tokens"]:
        tokens = [text.tokens for text in own]
        return np.exp(-ngrams.surprises([x.tokens for x in train], tokens, 3, kinds)[-1])

    counted, chances = _counted(other), trigrams(other)
    found = {"trigrams_nll": _nll(chances[counted])}
    if not validation or not train:
        return found
    known, held_out = trigrams(validation), (*validation, *other)
    of_known, kind = _counted(validation), _uncertainty(train, held_out)
    tokens = np.issubdtype(train[0].source.dtype, np.integer)
    mixed = []
    alone = np.concatenate([known, chances])
    for told_by in (_of_tokens if tokens else _of_vectors)(train, held_out, alone):
        told_known, told_other = np.split(told_by, [len(known)])
        kinds_known, kinds_other = np.split(kind, [len(known)])
        share = np.zeros(1 + kind.max())
        for each in np.unique(kinds_known[of_known]):
            own = of_known & (kinds_known == each)
            nats = [_nll(known[own] + x * (told_known[own] - known[own])) for x in _SHARES]
            share[each] = _SHARES[np.argmin(nats)]
        on_known = known + share[kinds_known] * (told_known - known)
        on_other = chances + share[kinds_other] * (told_other - chances)
        mixed.append((_nll(on_known[of_known]), _nll(on_other[counted])))
    return found | {"trigrams_and_source_nll": min(mixed)[1]}


def _texts(batches: Any, segments: Any, told: Any, source_of: SourceOf | None) -> Iterator[Text]:
    for batch in batches:
        owners = np.asarray(segments(batch))
        counted = owners > 0 if told is None else np.asarray(told(batch))
        for row, (tokens, owner) in enumerate(zip(batch["target_out"], owners, strict=True)):
            for number in range(1, int(owner.max(initial=0)) + 1):
                if len(own := tokens[owner == number]):
                    source = source_of(batch, row, number) if source_of else np.zeros(0)
                    yield Text(own.astype(np.int64), counted[row][owner == number], source)


def _counted(texts: Sequence[Text]) -> np.ndarray:
    return np.concatenate([text.counted for text in texts])


def _nll(chances: np.ndarray) -> float:
    return float(-np.log(np.maximum(chances, 1e-9)).mean())


def _of_tokens(
    train: Sequence[Text], other: Sequence[Text], alone: np.ndarray
) -> Iterator[np.ndarray]:
    """Yields the chance of each token by a hidden Markov model of the source's tokens, and by their bag."""

    def pairs(texts: Sequence[Text]) -> list[Any]:
        return [(list(map(str, text.source)), list(map(str, text.tokens))) for text in texts]

    yield np.concatenate(hmm.predictions(pairs(_some(train, MOST_PAIRS)), pairs(other)))
    size = 1 + max(int(text.source.max(initial=0)) for text in (*train, *other))

    def bags(texts: Sequence[Text]) -> list[Text]:
        return [x._replace(source=np.bincount(x.source, minlength=size) > 0.0) for x in texts]

    yield from _of_vectors(bags(_some(train, MOST_TEXTS)), bags(other), alone)


def _of_vectors(
    train: Sequence[Text], other: Sequence[Text], alone: np.ndarray
) -> Iterator[np.ndarray]:
    """Yields the chance of each token by logistic regressions of the source, ``alone`` without one."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    train = _some(train, MOST_TEXTS)
    known, asked = (np.stack([text.source for text in own]) for own in (train, other))
    narrowed = make_pipeline(
        TruncatedSVD(min(AXES, *known.shape), random_state=0), StandardScaler()
    )
    known, asked = narrowed.fit_transform(known), narrowed.transform(asked)
    places, here = _places(train), _places(other)
    for c in (0.1, 1.0, 10.0):
        found = alone.copy()
        for before, (own, wanted, at) in here.items():
            rows, tokens, _ = places.get(before, _NONE)
            if len(rows) < ENOUGH or len(set(tokens)) < 2:
                continue
            # Several threads wait for each other beside other work.
            with threadpool_limits(1), warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # at the limit of iterations
                warnings.filterwarnings("ignore", "The number of unique classes")  # of tokens
                model = LogisticRegression(C=c, max_iter=200, tol=1e-3).fit(known[rows], tokens)
            chances = model.predict_proba(asked[own])
            column = np.minimum(np.searchsorted(model.classes_, wanted), len(model.classes_) - 1)
            same = model.classes_[column] == wanted
            found[at] = np.where(same, chances[np.arange(len(own)), column], 0.0)
        yield found


def _some(texts: Sequence[Text], most: int) -> Sequence[Text]:
    return texts[:: -(-len(texts) // most)]


def _uncertainty(train: Sequence[Text], other: Sequence[Text]) -> Int[np.ndarray, " tokens"]:
    """Returns for each token how much the two before it leave open in training, in one of seven kinds."""
    entropies = {}
    for before, (_, tokens, _) in _places(train).items():
        _, counts = np.unique(tokens, return_counts=True)
        share = counts / counts.sum()
        entropies[before] = float(-(share * np.log(share)).sum())
    found = np.zeros(sum(len(text.tokens) for text in other), int)
    for before, (_, _, at) in _places(other).items():
        if before in entropies:
            found[at] = 1 + np.searchsorted((0.05, 0.3, 0.7, 1.5, 2.5), entropies[before])
    return found


def _places(texts: Sequence[Text]) -> dict[tuple[int, int], tuple[np.ndarray, ...]]:
    """Returns by the two tokens before: the text, the token, and its number among all, of each place."""
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    number = 0
    for row, text in enumerate(texts):
        tokens = text.tokens.tolist()
        for before, token in zip(
            zip([0, 0, *tokens], [0, *tokens], strict=False), tokens, strict=False
        ):
            found.setdefault(before, []).append((row, token, number))
            number += 1
    return {before: tuple(np.array(own).T) for before, own in found.items()}
