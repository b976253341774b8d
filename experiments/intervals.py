"""Confidence intervals by the bootstrap, over groups of examples that are not independent.

Examples of one family, file or speaker are drawn together; a difference of two systems is drawn of the same
groups for both. Source: Efron and Tibshirani 1993, chapters 6 and 8; of BLEU, Koehn 2004.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DRAWS = 2000
TEXT_DRAWS = 500


@dataclass(frozen=True)
class Interval:
    """A value and the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference is of one sign in the whole interval."""
        return self.low > 0 or self.high < 0

    def bounds(self, name: str) -> dict[str, float]:
        """Returns the bounds of a metric as results have them, NAME_low and NAME_high."""
        return {f"{name}_low": self.low, f"{name}_high": self.high}


def bars(intervals: Sequence[Interval]) -> tuple[list[float], list[list[float]]]:
    """Returns the values, and how far the bounds are below and above them, as matplotlib draws them."""
    below = [max(x.value - x.low, 0.0) for x in intervals]
    above = [max(x.high - x.value, 0.0) for x in intervals]
    return [x.value for x in intervals], [below, above]


def draw(
    ticks: Sequence[str], lines: Mapping[str, Sequence[Interval]], xlabel: str, ylabel: str
) -> Any:
    """Draws lines of values, each with a value a tick and bars of its intervals."""
    from crossattn.viz.figure import GRID, Picture

    figure = Picture()
    figure.set_size_inches(8, 4.5)
    axes = figure.subplots()
    for number, (name, line) in enumerate(lines.items()):
        values, beyond = bars(line)
        # Lines stand a little apart, or their bars would hide each other.
        places = [place + 0.06 * (number - (len(lines) - 1) / 2) for place in range(len(ticks))]
        axes.errorbar(places, values, beyond, marker="o", markersize=4, capsize=3, label=name)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return figure


def ratio(values: Any, weights: Any, groups: Sequence[Any] | None = None) -> Interval:
    """Returns the interval of sum(values) / sum(weights).

    Args:
      values, weights: of each example, [n].
      groups: the group of each example; None takes each alone.

    Raises:
      ValueError: there are no examples.
    """
    sums = _by_group((values, weights), groups)
    return _interval(sums, lambda total: total[..., 0] / total[..., 1])


def difference(
    first: Any, second: Any, weights: Any, groups: Sequence[Any] | None = None
) -> Interval:
    """Returns the interval of the ratio of ``second`` less that of ``first``, on the same examples."""
    sums = _by_group((first, second, weights), groups)
    return _interval(sums, lambda total: (total[..., 1] - total[..., 0]) / total[..., 2])


def of_texts(
    metric: Any,
    systems: Sequence[Sequence[Sequence[str]]],
    references: Sequence[str],
    groups: Sequence[Any],
) -> tuple[list[Interval], list[Interval]]:
    """Returns the intervals of each system's corpus score, and of each one's difference to the first.

    Args:
      metric: sacreBLEU's ``BLEU``, or its ``CHRF`` of characters alone; counts of each text are added up.
      systems: one or more lists of texts of each system, whose mean score counts, in the order of the
        references.
      references: one of each example.
      groups: the group of each example.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(str(group), []).append(index)
    known, random = list(members.values()), np.random.default_rng(0)
    scorers = [[_scorer(metric, texts, references) for texts in system] for system in systems]
    draws = [list(range(len(references)))]
    for _ in range(TEXT_DRAWS):
        draws.append(
            [i for group in random.integers(len(known), size=len(known)) for i in known[group]]
        )

    scores = np.array(
        [[np.mean([score(rows) for score in system]) for system in scorers] for rows in draws]
    )

    def intervals(values: np.ndarray) -> list[Interval]:
        low, high = np.percentile(values[1:], [2.5, 97.5], axis=0)
        return [Interval(*map(float, each)) for each in zip(values[0], low, high, strict=True)]

    return intervals(scores), intervals(scores - scores[:, :1])


def _scorer(
    metric: Any, texts: Sequence[str], references: Sequence[str]
) -> Callable[[list[int]], float]:
    """Returns the function from numbers of texts to their score."""
    pairs = list(zip(texts, references, strict=True))
    counts, score = (_bleu if hasattr(metric, "compute_bleu") else _chrf)(metric, pairs)
    return lambda rows: score(counts[rows].sum(0))


def _bleu(metric: Any, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, Any]:
    """Returns the counts of each text, and the function of their sum."""
    each = [metric.corpus_score([text], [[right]]) for text, right in pairs]
    counts = np.array([[*x.counts, *x.totals, x.sys_len, x.ref_len] for x in each])
    options = {name: getattr(metric, name) for name in ("smooth_method", "smooth_value")}
    options |= dict(effective_order=metric.effective_order, max_ngram_order=metric.max_ngram_order)

    def score(total: np.ndarray) -> float:
        *ngrams, sys_len, ref_len = total.tolist()
        half = len(ngrams) // 2
        return metric.compute_bleu(ngrams[:half], ngrams[half:], sys_len, ref_len, **options).score

    return counts, score


def _chrf(metric: Any, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, Any]:
    """The same of chrF: counts [order 3] of n-grams of the text, of the reference, and of both.

    Source: Popovic 2015; orders without n-grams on one side are left out, as sacreBLEU does.
    """
    from sacrebleu.metrics.helpers import extract_all_char_ngrams

    if metric.word_order or metric.lowercase or metric.whitespace or metric.eps_smoothing:
        raise ValueError("chrF has other options than sacreBLEU's own; expected CHRF().")

    def counted(text: str, right: str) -> list[tuple[int, int, int]]:
        both = (extract_all_char_ngrams(x, metric.char_order) for x in (text, right))
        return [
            (own.total() if other else 0, other.total(), (own & other).total())
            for own, other in zip(*both, strict=True)
        ]

    def score(total: np.ndarray) -> float:
        own, other, same = total[(total[:, 0] > 0) & (total[:, 1] > 0)].T
        precision, recall = (float(np.mean(same / x)) if len(x) else 0.0 for x in (own, other))
        weighted = metric.beta**2 * precision + recall
        return 100 * (1 + metric.beta**2) * precision * recall / weighted if weighted else 0.0

    return np.array([counted(*pair) for pair in pairs]), score


def _by_group(columns: Sequence[Any], groups: Sequence[Any] | None) -> np.ndarray:
    """Sums of each column [groups, columns]."""
    table = np.stack([np.asarray(column, np.float64) for column in columns], -1)
    if not len(table):
        raise ValueError("there are no examples to draw from")
    if groups is None:
        return table
    _, numbers = np.unique([str(group) for group in groups], return_inverse=True)
    sums = np.zeros((numbers.max() + 1, table.shape[1]))
    np.add.at(sums, numbers, table)
    return sums


def _interval(sums: np.ndarray, statistic: Any) -> Interval:
    count = len(sums)
    random = np.random.default_rng(0)
    drawn = random.multinomial(count, np.full(count, 1 / count), DRAWS) @ sums
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(drawn)
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Interval(float(statistic(sums.sum(0))), float(low), float(high))
