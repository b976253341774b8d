"""Start times of words, read from cross-attention, and the heads that tell them.

Some heads attend to the frames of the token that is being predicted. Dynamic time warping finds the
monotone path of the largest mean weight; a token starts at the frame at which the path enters its row.

Source: the alignment of openai-whisper; dynamic time warping, Sakoe and Chiba 1978.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossattn.types import Float, Int

_DIAGONAL, _DOWN, _RIGHT = 0, 1, 2


def token_starts(
    weights: Float[np.ndarray, "N T S"], first: int = 0, last: int | None = None, width: int = 7
) -> Int[np.ndarray, " t"]:
    """Returns the source position at which each of the rows ``first`` to ``last`` begins, in ascending order.

    Args:
      weights: attention of heads that are aligned with the source, without padding on either axis.
      first, last: bounds of a slice of rows; rows outside (an unspoken prefix, the end) take part in the
        scaling only.
      width: width of the median filter along the source, odd.
    """
    return _starts(sharpened(weights, width)[first:last])


def _starts(sharp: Float[np.ndarray, "T S"]) -> Int[np.ndarray, " T"]:
    rows, places = warp(-sharp)
    return places[np.diff(rows, prepend=-1) > 0]


def sharpened(weights: Float[np.ndarray, "N T S"], width: int = 7) -> Float[np.ndarray, "T S"]:
    """Returns the mean of heads after each source position is standardised over the rows.

    Positions that every token attends to (the beginning, a loud noise) carry no timing and vanish.
    """
    weights = np.asarray(weights, np.float32)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    spread = weights.std(axis=-2, keepdims=True)
    scaled = (weights - weights.mean(axis=-2, keepdims=True)) / np.maximum(spread, 1e-12)
    return median(scaled, width).mean(axis=0)


Heads = tuple[tuple[int, int], ...]
"""(layer, head), from 0."""


@dataclass(frozen=True)
class Timed:
    """Words of a text whose times are known, and the attention of all heads to its sound.

    Attributes:
      sharp: ``sharpened`` of each head alone, rows of the text's tokens and their end.
      rows: rows of each word's first token and of the one after its last, [W 2].
      times: where each word begins and ends, in source positions.
    """

    sharp: Float[np.ndarray, "L N T S"]
    rows: Int[np.ndarray, "W 2"]
    times: Float[np.ndarray, "W 2"]

    def errors(self, heads: Heads) -> Float[np.ndarray, "W 2"]:
        """Returns how far the times by some heads are from the known ones, in source positions."""
        starts = _starts(np.stack([self.sharp[head] for head in heads]).mean(0, dtype=np.float32))
        return np.abs(starts[self.rows] - self.times)


def choose_heads(texts: Sequence[Timed], most: int = 16) -> Heads:
    """Chooses heads by the mean error of the times of words: as many of the best alone as are best together.

    Args:
      texts: one or more, of one model.
      most: the largest number of heads.
    """

    def error(heads: Heads) -> float:
        return float(np.mean(np.concatenate([text.errors(heads).ravel() for text in texts])))

    every = [(layer, head) for layer, head in np.ndindex(texts[0].sharp.shape[:2])]
    alone = {head: error((head,)) for head in every}
    ranked = tuple(sorted(every, key=alone.__getitem__))
    return min((ranked[:n] for n in range(1, min(most, len(ranked)) + 1)), key=error)


def median(x: Float[np.ndarray, "*B S"], width: int) -> Float[np.ndarray, "*B S"]:
    """Computes the median of ``width`` neighbours along the last axis, mirrored at both ends.

    Raises:
      ValueError: the width is even.
    """
    if width % 2 == 0:
        raise ValueError(f"width is {width}; expected an odd number.")
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1), axis=-1)


def warp(
    cost: Float[np.ndarray, "T S"],
) -> tuple[Int[np.ndarray, " P"], Int[np.ndarray, " P"]]:
    """Finds the cheapest path from the first cell to the last, by steps down, right and diagonal.

    Returns:
      The rows and the columns of its cells, in order.
    """
    T, S = cost.shape
    total = np.full((T + 1, S + 1), np.inf)
    total[0, 0] = 0.0
    came = np.zeros((T + 1, S + 1), np.int8)
    # A cell needs its three neighbours above and left, so the cells of one antidiagonal are independent.
    for diagonal in range(2, T + S + 1):
        i = np.arange(max(1, diagonal - S), min(T, diagonal - 1) + 1)
        j = diagonal - i
        before = np.stack([total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]])
        # The last of equal steps is taken, so that a path waits before it goes on.
        step = 2 - np.argmin(before[::-1], axis=0)
        came[i, j] = step
        total[i, j] = cost[i - 1, j - 1] + np.take_along_axis(before, step[None], axis=0)[0]
    rows, columns, i, j = [], [], T, S
    while i > 0 and j > 0:
        rows.append(i - 1)
        columns.append(j - 1)
        step = came[i, j]
        i -= step != _RIGHT
        j -= step != _DOWN
    return np.array(rows[::-1]), np.array(columns[::-1])
