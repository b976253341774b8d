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

MOST_TEXTS, MOST_PLACES = 5_000, 2_000
"""Training texts, and places after one pair of tokens, that a logistic regression learns from at most."""
MOST_LINKS, LONGEST = 30_000_000, 1_024
"""Pairs of a source and a target token that a hidden Markov model learns from, and its longest source."""
ENOUGH, SURE = 10, 20
"""Training places that a logistic regression needs, and counted tokens of validation that a share needs."""
_SHARES = np.append(np.arange(20) / 20, 0.99)
_OPEN = (0.05, 0.3, 0.7, 1.5, 2.5)
_SIDE = 32

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
      task, split: of the targets. On "validation" the reader is chosen on what is scored.
      segments: gives the segment of each token of ``target_out`` in a batch; 0 is no part of a target.
      told: gives the mask of the tokens that count; trigrams read the others of a target too. None is all.
      source_of: None scores trigrams alone.
    """

    def texts(name: str) -> Iterator[Text]:
        return _texts(task.eval_batches(name, None), segments, told, source_of)

    train, readable = _thinned(texts("train"))
    other = list(texts(split))
    validation = list(texts("validation")) if source_of else []
    every = (*train, *(text.tokens for text in (*validation, *other)))
    kinds = 1 + max(int(tokens.max(initial=0)) for tokens in every)

    def trigrams(own: Sequence[Text]) -> Float[np.ndarray, " tokens"]:
        return np.exp(-ngrams.surprises(train, [text.tokens for text in own], 3, kinds)[-1])

    chances, counted = trigrams(other), _counted(other)
    found = {"trigrams_nll": _nll(chances[counted])}
    if not validation or not readable:
        return found
    known, of_known, held_out = trigrams(validation), _counted(validation), (*validation, *other)
    open_known, open_other = np.split(_openness(train, held_out, kinds), [len(known)])
    read = _of_tokens if np.issubdtype(readable[0].source.dtype, np.integer) else _of_vectors
    mixed = []
    for by_source in read(readable, held_out, np.concatenate([known, chances]), kinds):
        of_validation, of_split = np.split(by_source, [len(known)])
        share = _shares(known[of_known], of_validation[of_known], open_known[of_known])
        on_known = known + share[open_known] * (of_validation - known)
        on_other = chances + share[open_other] * (of_split - chances)
        mixed.append((_nll(on_known[of_known]), _nll(on_other[counted])))
    return found | {"trigrams_and_source_nll": min(mixed, key=lambda each: each[0])[1]}


def thumbnail(picture: Float[np.ndarray, "H W C"]) -> Float[np.ndarray, " numbers"]:
    """Returns the pixels of a picture that a baseline reads: of a large one, some at equal distances."""
    height, width = (max(1, size // _SIDE) for size in picture.shape[:2])
    return picture[::height, ::width].ravel().copy()


def _texts(batches: Any, segments: Any, told: Any, source_of: SourceOf | None) -> Iterator[Text]:
    for batch in batches:
        owners = np.asarray(segments(batch))
        counted = owners > 0 if told is None else np.asarray(told(batch))
        for row, (tokens, owner) in enumerate(zip(batch["target_out"], owners, strict=True)):
            for number in range(1, int(owner.max(initial=0)) + 1):
                if len(own := tokens[owner == number]):
                    source = source_of(batch, row, number) if source_of else np.zeros(0)
                    yield Text(own.astype(np.int64), counted[row][owner == number], source)


def _thinned(texts: Iterator[Text]) -> tuple[list[np.ndarray], list[Text]]:
    """Returns the tokens of all texts, and at equal distances those that readers learn from."""
    tokens, kept, step = list[np.ndarray](), list[Text](), 1
    links = 0
    for number, text in enumerate(texts):
        tokens.append(text.tokens)
        if number % step:
            continue
        kept.append(text)
        whole = np.issubdtype(text.source.dtype, np.integer)
        links += len(text.source) * len(text.tokens) if whole else 0
        if links > MOST_LINKS or (not whole and len(kept) > 2 * MOST_TEXTS):
            kept, step = kept[::2], 2 * step
            links //= 2
    return tokens, kept


def _counted(texts: Sequence[Text]) -> np.ndarray:
    return np.concatenate([text.counted for text in texts])


def _nll(chances: np.ndarray) -> float:
    return float(-np.log(np.maximum(chances, 1e-9)).mean())


def _shares(alone: np.ndarray, by_source: np.ndarray, openness: np.ndarray) -> np.ndarray:
    """Returns the best share of the reader by openness; where there are few tokens, the best of all."""

    def best(own: Any) -> float:
        nats = [_nll(alone[own] + x * (by_source[own] - alone[own])) for x in _SHARES]
        return float(_SHARES[np.argmin(nats)])

    found = np.full(2 + len(_OPEN), best(slice(None)))
    for each, count in zip(*np.unique(openness, return_counts=True), strict=True):
        if count >= SURE:
            found[each] = best(openness == each)
    return found


def _of_tokens(
    train: Sequence[Text], other: Sequence[Text], alone: np.ndarray, kinds: int
) -> Iterator[np.ndarray]:
    """Yields the chance of each token by a hidden Markov model of the source's tokens, and by their bag."""

    def pairs(texts: Sequence[Text]) -> list[Any]:
        return [(list(map(str, text.source)), list(map(str, text.tokens))) for text in texts]

    if max(len(text.source) for text in (*train, *other)) <= LONGEST:
        yield np.concatenate(hmm.predictions(pairs(train), pairs(other)))
    size = 1 + max(int(text.source.max(initial=0)) for text in (*train, *other))
    some = _some(train, MOST_TEXTS)
    known, asked = _bags(some, size), _bags(other, size)
    yield from _by_logistic(known, asked, some, other, alone, kinds)


def _bags(texts: Sequence[Text], size: int) -> Any:
    """Returns which tokens each source has [texts size], sparse."""
    from scipy.sparse import csr_matrix

    tokens = [np.unique(text.source) for text in texts]
    ends = np.cumsum([0, *map(len, tokens)])
    return csr_matrix((np.ones(ends[-1]), np.concatenate(tokens), ends), (len(texts), size))


def _of_vectors(
    train: Sequence[Text], other: Sequence[Text], alone: np.ndarray, kinds: int
) -> Iterator[np.ndarray]:
    """Yields the chance of each token by logistic regressions of the source's numbers."""
    some = _some(train, MOST_TEXTS)
    known, asked = (np.stack([text.source for text in own]) for own in (some, other))
    yield from _by_logistic(known, asked, some, other, alone, kinds)


def _by_logistic(
    known: Any,
    asked: Any,
    train: Sequence[Text],
    other: Sequence[Text],
    alone: np.ndarray,
    kinds: int,
) -> Iterator[np.ndarray]:
    """Yields the chance of each token by logistic regressions of sources; ``alone`` without one.

    Args:
      known, asked: what is told of the sources of the two lists of texts, [texts numbers].
      train, other: the texts.
      alone: chances without a source.
      kinds: of tokens.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    axes = min(AXES, *known.shape)
    narrowing = [TruncatedSVD(axes, random_state=0)] if known.shape[1] > 1 else []
    narrowed = make_pipeline(*narrowing, StandardScaler(with_mean=bool(narrowing)))
    known, asked = narrowed.fit_transform(known), narrowed.transform(asked)
    places, here = _places(train, kinds), _places(other, kinds)
    for c in (0.1, 1.0, 10.0):
        found = alone.copy()
        for before, (own, wanted, at) in here.items():
            rows, tokens, _ = (_some(x, MOST_PLACES) for x in places.get(before, _NONE))
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


def _some(items: Any, most: int) -> Any:
    """Returns at most so many of the items, at equal distances."""
    if len(items) <= most:
        return items
    chosen = np.linspace(0, len(items) - 1, most).astype(int)
    return items[chosen] if isinstance(items, np.ndarray) else [items[i] for i in chosen]


_NONE = (np.zeros(0, int),) * 3


def _places(texts: Sequence[Text], kinds: int) -> dict[int, tuple[np.ndarray, ...]]:
    """Returns by the two tokens before: the text, the token, and its number among all, of each place."""
    tokens = [text.tokens for text in texts]
    before = _before(tokens, kinds)
    rows = np.repeat(np.arange(len(texts)), [len(own) for own in tokens])
    order = np.argsort(before, kind="stable")
    values, starts = np.unique(before[order], return_index=True)
    flat = np.concatenate(tokens)
    groups = np.split(order, starts[1:])
    return {int(value): (rows[at], flat[at], at) for value, at in zip(values, groups, strict=True)}


def _before(tokens: Sequence[np.ndarray], kinds: int) -> Int[np.ndarray, " tokens"]:
    """Returns the two tokens before each as one number; 0 stands before a text."""
    found = []
    for own in tokens:
        padded = np.concatenate([[0, 0], own])
        found.append(padded[:-2] * kinds + padded[1:-1])
    return np.concatenate(found)


def _openness(
    train: Sequence[np.ndarray], other: Sequence[Text], kinds: int
) -> Int[np.ndarray, " tokens"]:
    """Returns how much the two tokens before each leave open: 1 to 6 by entropy in training, or 0, unseen."""
    grams, counts = np.unique(
        _before(train, kinds) * kinds + np.concatenate(train), return_counts=True
    )
    seen, starts = np.unique(grams // kinds, return_index=True)
    totals = np.add.reduceat(counts, starts)
    entropies = np.log(totals) - np.add.reduceat(counts * np.log(counts), starts) / totals
    wanted = _before([text.tokens for text in other], kinds)
    at = np.minimum(np.searchsorted(seen, wanted), len(seen) - 1)
    return np.where(seen[at] == wanted, 1 + np.searchsorted(_OPEN, entropies[at]), 0)
