"""Compare runs: a table with intervals, what differs in their configs, and their learning curves.

    python -m experiments.compare runs/a runs/b runs/c
    python -m experiments.compare runs/a runs/b --split=test --plot=curves.png --html=compare.html
    python -m experiments.compare runs/a runs/b --by_length=5 --plot=lengths.png
    python -m experiments.compare runs/plain runs/retro --split=test --by_overlap --plot=overlaps.png

Each run is held to the first one. Scores of a split are those that ``experiments.evaluate`` has written; the
row of a run without any has those of its last evaluation in training, of validation. Intervals are of 95 %:
by a bootstrap over groups of examples (families, files), paired between runs, of the mean of several seeds;
of BLEU and chrF of single runs without groups by sacreBLEU's own paired bootstrap; of other metrics of
several seeds the least and the greatest. --by_length adds the BLEU of each run by the words of the source, in
bins of equal counts; --by_overlap adds what retrieved passages take off the loss where they overlap with the
text by at most so much. --plot and --html then draw these instead of the learning curves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from crossattn import viz
from crossattn.train.records import RunRecord, read_run
from crossattn.train.storage import folder, write_whole
from experiments import launch, overlaps, report
from experiments.intervals import Interval, difference, ratio
from experiments.runs import SPLIT
from experiments.text_scores import Bin, by_length, draw, paired, said, texts_of

_METRIC = flags.DEFINE_string("metric", "loss", "Metric of the learning curves.")
_HTML = flags.DEFINE_string("html", None, "Write one page with tables and curves into this file.")
_TOKENIZE = flags.DEFINE_string("bleu_tokenize", "13a", "sacreBLEU's tokenizer.")
_BY_LENGTH = flags.DEFINE_integer(
    "by_length", None, "Score and draw texts in so many bins of source lengths.", lower_bound=1
)
_BY_OVERLAP = flags.DEFINE_bool(
    "by_overlap", False, "Score and draw the gain of passages by their overlap with the text."
)
FLAGS = (SPLIT, _METRIC, _HTML, _TOKENIZE, _BY_LENGTH, _BY_OVERLAP, launch.PLOT)

_BASELINE = "baseline_"
_IN_LOG = "validation"  # the split of evaluations between steps
_NOT_METRICS = (
    "split",
    "step",
    "aligned_pairs",
    "sentences",
    "decoding_seconds",
    "num_beams",
    "cut_sources",
)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if len(arguments) < 2:
        raise launch.Refused(
            f"got {len(arguments)} work directories; expected two or more, runs/a runs/b."
        )
    picture = launch.picture()
    page = None if _HTML.value is None else folder(_HTML.value)
    if page is not None:
        launch.writable(page)
    runs = {str(path): read_run(path) for path in arguments}
    if len(runs) < len(arguments):
        raise launch.Refused("a work directory is given twice.")
    tables = {
        "What differs in the configs": differing(runs),
        "Scores": scores(runs, SPLIT.value),
        f"Baselines, {SPLIT.value}": baselines(runs, SPLIT.value),
        f"Differences to {next(iter(runs))}": differences(runs, SPLIT.value, _TOKENIZE.value),
    }
    results = {name: run.results.get(SPLIT.value, {}) for name, run in runs.items()}
    bins = _bins(results)
    tables[f"BLEU by the length of the source, {SPLIT.value}"] = lengths(bins)
    gained = overlaps.gains(results) if _BY_OVERLAP.value else ({}, {})
    tables[f"Gain by overlap, nats a token, {SPLIT.value}"] = overlaps.table(*gained)
    for title, rows in tables.items():
        if len(rows) > 1:
            print(f"{title}\n{report.markdown(rows)}\n")
    if picture is None and page is None:
        return 0
    if _BY_OVERLAP.value:
        drawn, figure = "Gain by overlap", overlaps.draw(*gained)
    elif bins:
        drawn, figure = "BLEU by length", draw(bins)
    else:
        drawn, figure = "Learning curves", curves(runs, _METRIC.value)
    if picture is not None:
        viz.save(figure, picture)
    if page is not None:
        write_whole(page, report.page("Runs compared", tables, figure, drawn))
    return 0


def differing(runs: Mapping[str, RunRecord]) -> list[tuple[str, ...]]:
    """Returns rows of the config's keys whose values are not the same in all runs."""
    missing = object()
    names = sorted({name for run in runs.values() for name in run.settings})
    rows: list[tuple[str, ...]] = [("key", *runs)]
    for name in names:
        values = [run.settings.get(name, missing) for run in runs.values()]
        if any(value != values[0] for value in values):
            rows.append((name, *("not set" if x is missing else str(x) for x in values)))
    return rows


def scores(runs: Mapping[str, RunRecord], split: str) -> list[tuple[str, ...]]:
    """Returns rows of each run's metrics, with intervals where its examples were written down.

    The split of a row whose run was not evaluated on this one is that of its log, validation.
    """
    found = {name: _scores(run, split) for name, run in runs.items()}
    metrics = list(dict.fromkeys(metric for own in found.values() for metric in own))
    rows: list[tuple[str, ...]] = [("run", "steps", "split", *metrics)]
    for name, run in runs.items():
        steps = max((line["step"] for line in run.metrics), default=0)
        if (results := run.results.get(split)) is None:
            of = f"{_IN_LOG}, in training" if found[name] else ""
        else:
            of = f"{split}, {results['member']}" if "member" in results else split
            steps = results.get("step", steps)
        values = (str(found[name].get(metric, "")) for metric in metrics)
        rows.append((name, str(steps), of, *values))
    return rows


def _scores(run: RunRecord, split: str) -> dict[str, Interval | str]:
    results, spread = run.results.get(split), {}
    if results is None:
        lines = [line for line in run.metrics if line["kind"] == "eval"]
        results = {k: v for k, v in lines[-1].items() if k not in ("step", "kind")} if lines else {}
    numbers = {k: v for k, v in results.items() if isinstance(v, int | float)}
    for name, value in numbers.items():
        each = [x for other, x in numbers.items() if other.endswith(f"/{name}")]
        if "/" in name or name in _NOT_METRICS or name.startswith(_BASELINE):
            continue
        spread[name] = Interval(value, min(each), max(each)) if each else f"{value:.4g}"
    return spread | _by_examples(results)


def _by_examples(results: Mapping[str, Any]) -> dict[str, Interval]:
    """Returns intervals of metrics that are means over examples."""
    table = results.get("examples") or {}
    weights, groups = table.get("weight"), table.get("group")
    return {
        name: ratio(values, weights, groups)
        for name, values in table.items()
        if name not in ("weight", "group")
    }


def baselines(runs: Mapping[str, RunRecord], split: str) -> list[tuple[str, ...]]:
    """Returns rows of the baselines that ``experiments.evaluate --baselines`` wrote."""
    found = {
        name.removeprefix(_BASELINE): f"{value:.4g}"
        for run in runs.values()
        for name, value in run.results.get(split, {}).items()
        if name.startswith(_BASELINE) and "/" not in name
    }
    return [("baseline", "score"), *found.items()]


def differences(
    runs: Mapping[str, RunRecord], split: str, tokenize: str = "13a"
) -> list[tuple[str, ...]]:
    """Returns rows of what each run has more than the first, with paired intervals.

    Raises:
      Refused: two runs were evaluated on other examples.
    """
    first, *others = runs
    rows: list[tuple[str, ...]] = [("run", "metric", "score or difference", "said")]
    for name in others:
        found = _paired({which: runs[which].results.get(split, {}) for which in (first, name)})
        if found is None:
            rows.append((name, "nll", "", "of other tokens: not compared"))
        for metric, interval in (found or {}).items():
            rows.append((name, metric, str(interval), said(interval)))
    texts = texts_of({name: run.results.get(split, {}) for name, run in runs.items()})
    if texts is not None:
        rows += [(name, m, str(score), how) for name, m, score, how in paired(texts, tokenize)]
    return rows


def _paired(results: Mapping[str, Any]) -> dict[str, Interval] | None:
    """Returns what the second of two results has more than the first; None where its tokens are others."""
    one, other = (each.get("examples") or {} for each in results.values())
    if not one or not other:
        return {}
    if one.get("group") != other.get("group"):
        raise launch.Refused(
            f"{' and '.join(results)} were evaluated on other examples; evaluate both on the same split."
        )
    if one.get("weight") != other.get("weight"):
        return None
    return {
        metric: difference(one[metric], other[metric], one["weight"], one.get("group"))
        for metric in one.keys() & other.keys() - {"weight", "group"}
    }


def _bins(results: Mapping[str, Any]) -> list[Bin]:
    if _BY_LENGTH.value is None:
        return []
    if _BY_OVERLAP.value:
        raise launch.Refused("--by_length and --by_overlap are one picture each; give one of them.")
    texts = texts_of(results)
    if texts is None:
        raise launch.Refused("a run has no texts to score by length; evaluate each of them first.")
    return by_length(texts, _BY_LENGTH.value, _TOKENIZE.value)


def lengths(bins: Sequence[Bin]) -> list[tuple[str, ...]]:
    """Returns rows of each run's BLEU by the length of the source."""
    rows: list[tuple[str, ...]] = [("length", "texts", *bins[0].scores)] if bins else []
    for own in bins:
        cells = (
            ", ".join(filter(None, (str(score), own.said.get(name))))
            for name, score in own.scores.items()
        )
        rows.append((own.words, str(own.count), *cells))
    return rows


def curves(runs: Mapping[str, RunRecord], metric: str) -> Any:
    """Draws a metric of all runs by step: lines of evaluations, thin ones of training, bands of members.

    Raises:
      Refused: no run has the metric.
    """
    from crossattn.viz.figure import GRID, Picture

    figure = Picture()
    figure.set_size_inches(8, 4.5)
    axes = figure.subplots()
    drawn = False
    for index, (name, run) in enumerate(runs.items()):
        colour = f"C{index}"
        styles: Any = {"train": dict(alpha=0.4, linewidth=1), "eval": dict(marker="o")}
        for kind, style in styles.items():
            steps, values = run.curve(kind, metric)
            if not steps:
                continue
            drawn = True
            label = name if kind == "eval" or not run.curve("eval", metric)[0] else None
            axes.plot(steps, values, color=colour, label=label, markersize=3, **style)
            each = [run.curve(kind, f"{member}/{metric}")[1] for member in run.members(metric)]
            if each and all(len(own) == len(steps) for own in each):
                low, high = np.min(each, 0), np.max(each, 0)
                axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    if not drawn:
        known = sorted(
            {k for run in runs.values() for line in run.metrics for k in line if "/" not in k}
        )
        raise launch.Refused(
            f"no run has the metric {metric!r} in its log; expected one of {', '.join(known)}."
        )
    axes.set(xlabel="step", ylabel=metric)
    axes.grid(color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    launch.run(main)
