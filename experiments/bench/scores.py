"""Scores of what a translated word rests on, by their agreement with leaving source tokens out.

    python -m experiments.bench.scores runs/demo --split=validation --rows=32

For every target token of the first rows of the batch in the middle of the split, source tokens are ranked by
each score of ``crossattn.analysis.scores`` and by how much less likely the token is without them. The table
has the mean rank correlation over target tokens (Spearman's, Kendall's, Spearman's of sizes without signs,
which weights do not have), how often both have the same first source token, intervals of 95 % by a bootstrap
over sentences, and processor seconds of the score.
"""

import time
from typing import Any

import jax
import numpy as np

from crossattn.analysis import scores
from experiments import launch
from experiments.bench import contest
from experiments.bench.knockouts import given, rows_of
from experiments.intervals import ratio

_FEWEST = 4  # source tokens of a sentence whose order says something
_WIDTH = 22  # characters of a column


def main() -> None:
    """Measures and prints."""
    task, params, batch, split = given(__doc__, rows=32)
    found, seconds = {}, {}
    for name, score in scores.SCORES.items():
        program = jax.jit(lambda p, score=score: score(task.bind(p), batch)).lower(params).compile()
        start = time.process_time()
        found[name] = np.asarray(program(params))
        seconds[name] = time.process_time() - start
    *names, reference = found
    print(f"{contest.machine()}; {rows_of(batch)} sentences of {split}\n")
    heads = " ".join(f"{name:<{_WIDTH}}" for name in _HOW)
    print(f"{'against ' + reference:<34} {heads} seconds")
    for name in names:
        rows = [agreements(found[name], found[reference], batch, how) for how in _HOW.values()]
        told = " ".join(f"{interval(row):<{_WIDTH}}" for row in rows)
        print(f"{name:<34} {told} {seconds[name]:.1f}")
    print(f"{reference:<34} {'':<{len(heads)}} {seconds[reference]:.1f}")


def same_first(one: np.ndarray, other: np.ndarray) -> float:
    """Returns whether two lists have their largest number at the same place."""
    return float(np.argmax(one) == np.argmax(other))


def of_sizes(one: np.ndarray, other: np.ndarray) -> float:
    """Returns Spearman's correlation of two lists without signs."""
    return scores.spearman(np.abs(one), np.abs(other))


_HOW = {
    "Spearman": scores.spearman,
    "Kendall": scores.kendall,
    "of sizes": of_sizes,
    "same first": same_first,
}


def agreements(one: np.ndarray, other: np.ndarray, batch: Any, how: Any) -> list[list[float]]:
    """Returns for each sentence the agreement of two scores [B T S] on each of its target tokens."""
    found = []
    for row in range(len(one)):
        source = np.asarray(batch["source_segment_ids"][row]) > 0
        target = np.flatnonzero(batch["target_segment_ids"][row]) if source.sum() >= _FEWEST else []
        own = [how(one[row, t, source], other[row, t, source]) for t in target]
        found.append([x for x in own if np.isfinite(x)])
    return [own for own in found if own]


def interval(rows: list[list[float]]) -> str:
    """Returns the mean over tokens with its interval over sentences."""
    sums, counts = [sum(own) for own in rows], [len(own) for own in rows]
    own = ratio(sums, counts)
    return f"{own.value:.2f} ({own.low:.2f} to {own.high:.2f})"


if __name__ == "__main__":
    launch.script(main)
