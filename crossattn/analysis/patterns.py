"""Patterns of an alignment: in what order, and how many to how many, targets read their sources.

An alignment is weights w [T S] of attention, or of links (``of_links``). Each row is divided by its sum and
is the probability that target t belongs to source s; rows without weight have no part in it. With s and s'
drawn from rows t < t', or from neighbouring rows:

    crossing        mean over t < t' of P(s > s')                         0 in order, 1 turned round
    monotonic       1 - crossing
    diagonal        1 - E |s/S - t/T| / that of even weights              1 on the diagonal, 0 without order
    scattered       E of the weight of the sources between s and s' of neighbours / that of s and s' drawn
                    from all rows                                         1 without order, 0 turned round too
    many_to_one     mean over t of P(two draws from row t differ)         1 - 1/k where a target has k sources
    one_to_many     the same of columns, each by its mass                 1 - 1/k where a source has k targets

Sources without weight count for nothing in "scattered". Even weights are scattered as well, and many to one:
patterns of links tell order from doubt.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from crossattn.types import Float

PATTERNS = ("monotonic", "diagonal", "scattered", "many_to_one", "one_to_many")
Weights = Float[np.ndarray, "T S"]


def of_links(links: Iterable[Sequence[int]], targets: int, sources: int) -> Weights:
    """Returns the weights of links (source, target), equal ones for the sources of a target.

    Raises:
      ValueError: a link is of a word that there is not.
    """
    weights = np.zeros((targets, sources))
    for source, target in links:
        if not (0 <= source < sources and 0 <= target < targets):
            raise ValueError(
                f"the link ({source}, {target}) is outside {sources} sources and {targets} targets."
            )
        weights[target, source] = 1.0
    return weights / np.maximum(weights.sum(1, keepdims=True), 1.0)


def patterns(weights: Weights) -> dict[str, float]:
    """Returns the value of each of ``PATTERNS``; nan where there are fewer than two rows or sources.

    Raises:
      ValueError: the weights are not [T S], or some are negative or not finite.
    """
    rows, places = _rows(weights)
    count, sources = rows.shape
    if count < 2 or sources < 2:
        return dict.fromkeys(PATTERNS, float("nan"))
    shares = rows / np.maximum(rows.sum(0), 1e-300)
    return {
        "monotonic": 1.0 - crossing_rate(weights),
        "diagonal": _diagonal(rows, places, len(weights)),
        "scattered": _scattered(rows),
        "many_to_one": float(1.0 - np.square(rows).sum(1).mean()),
        "one_to_many": float((rows.sum(0) * (1.0 - np.square(shares).sum(0))).sum() / count),
    }


def crossing_rate(weights: Weights) -> float:
    """Returns the probability that the sources of two targets stand in the other order."""
    rows, _ = _rows(weights)
    if len(rows) < 2:
        return float("nan")
    below = np.cumsum(rows, 1) - rows  # P(s' < s)
    crossed = rows @ below.T  # [t, t'] is P(s' < s) of s from row t and s' from row t'
    return float(crossed[np.triu_indices(len(rows), 1)].mean())


def fertility(weights: Weights) -> Float[np.ndarray, " S"]:
    """Returns how many targets each source has, in expectation. Source: Brown et al. 1993."""
    return _rows(weights)[0].sum(0)


def _rows(weights: Weights) -> tuple[Float[np.ndarray, "rows S"], np.ndarray]:
    """Returns the rows that have weight, each divided by its sum, and their numbers."""
    given = np.asarray(weights, np.float64)
    if given.ndim != 2 or not np.isfinite(given).all() or (given < 0).any():
        raise ValueError(
            f"weights have shape {given.shape}; expected finite weights [T S] of 0 or more, one head of one"
            " sentence."
        )
    places = np.flatnonzero(given.sum(1) > 0)
    rows = given[places]
    return rows / rows.sum(1, keepdims=True), places


def _diagonal(rows: Float[np.ndarray, "rows S"], places: np.ndarray, targets: int) -> float:
    sources = rows.shape[1]
    along = (np.arange(sources) + 0.5) / sources, (places + 0.5) / targets
    apart = np.abs(along[0] - along[1][:, None])
    return float(1.0 - (rows * apart).sum() / apart.mean(1).sum())


def _scattered(rows: Float[np.ndarray, "rows S"]) -> float:
    mass = rows.mean(0)
    until = np.cumsum(mass)
    below = np.triu(until - mass - until[:, None], 1)  # between s and s' > s
    between = np.maximum(below + below.T, 0.0)
    usual = mass @ between @ mass
    if usual <= 1e-12:  # all is of two sources that are neighbours
        return 0.0
    return float(np.einsum("ts,sr,tr->t", rows[:-1], between, rows[1:]).mean() / usual)
