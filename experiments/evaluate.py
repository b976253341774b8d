"""Score a checkpoint on a split, and print a few samples.

    python -m experiments.evaluate --workdir=runs/fr --split=test --num_beams=5
    python -m experiments.evaluate --workdir=runs/emoji --baselines

Of several runs that were trained as one (``train.seeds``, ``train.sweep``) each is scored, and a metric is
the mean; --member names one. METRIC_shuffled is the task's main metric where each example has the memory of
another. --baselines also scores what needs no such model, by scikit-learn.
"""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from crossattn.train import processes
from experiments import launch, report
from experiments.runs import (
    BASE,
    MEMBER,
    NUM_BEAMS,
    SPLIT,
    STEP,
    members_of,
    open_run,
    parameters,
    step_of,
)

_LOG = logging.getLogger(__name__)
_LIMIT = flags.DEFINE_integer(
    "limit", None, "Score only the first so many examples.", lower_bound=1
)
_BASELINES = flags.DEFINE_bool("baselines", False, "Also score the baselines of the task.")
_SAMPLES = 3
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, SPLIT, MEMBER, BASE, NUM_BEAMS, _LIMIT, _BASELINES,
    *launch.PROCESSES,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Scores a run, and writes results-SPLIT.json into its folder."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    path = launch.required_workdir() / f"results-{SPLIT.value}.json"
    workdir, task, params = open_run()
    read = {"step": step_of(workdir, STEP.value), "member": MEMBER.value}
    launch.writable(path)
    if _BASELINES.value and importlib.util.find_spec("sklearn") is None:
        raise launch.Refused("--baselines needs scikit-learn: pip install 'crossattn[baselines]'")
    given = {flag.name: flag.value for flag in (NUM_BEAMS, _LIMIT) if flag.value is not None}
    members = [] if MEMBER.value else members_of(task.config)
    results = _report(task, params, given)
    if members:
        reports = [results]
        for name in list(members)[1:]:
            reports.append(_report(task, parameters(task, workdir, STEP.value, name), given))
        results = of_all(dict(zip(members, reports, strict=True)))
    results = {name: x for name, x in read.items() if x is not None} | results
    if _BASELINES.value:
        if _LIMIT.value is not None:
            _LOG.warning("the baselines are of the whole split, not of its first %d", _LIMIT.value)
        results |= {f"baseline_{name}": x for name, x in task.baselines(SPLIT.value).items()}
    samples = task.samples(params, SPLIT.value)[:_SAMPLES]
    if samples and processes.is_main():
        print("\n\n".join(samples))
    report.save(results, path)
    report.show(results)
    return 0


def _report(task: Any, params: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of a split, and the main metric with the memories of other examples."""
    results, (metric, _) = task.report(params, SPLIT.value, **options), task.headline
    if task.memory:
        shuffled = task.split_loss(params, SPLIT.value, task.shuffled)[metric]
        results = {**results, f"{metric}_shuffled": shuffled}
    return results


def of_all(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the results of members as one: numbers are means, and each is there as MEMBER/NAME.

    Samples have the text of each as MEMBER/NAME.
    """
    found: dict[str, Any] = dict(next(iter(reports.values())))
    for name, value in list(found.items()):
        each: dict[str, Any] = {member: report.get(name) for member, report in reports.items()}
        if all(type(x) is float for x in each.values()):
            found[name] = sum(each.values()) / len(each)
            found |= {f"{member}/{name}": x for member, x in each.items()}
        elif name in ("examples", "chunks"):
            found[name] = {key: _mean([x[key] for x in each.values()]) for key in value}
        elif name == "samples":
            found[name] = _samples_of_all(each)
    return found


def _samples_of_all(each: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the samples of members as one list: what they do not agree on is there as MEMBER/NAME."""
    first = next(iter(each.values()))
    columns: dict[str, list[Any]] = {}
    for name in first[0] if first else ():
        own = {f"{member}/{name}": [x[name] for x in samples] for member, samples in each.items()}
        values = [x[name] for x in first]
        agreed = all(others == values for others in own.values())
        columns |= {name: values} if agreed else own
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _mean(lists: Sequence[list[Any]]) -> list[Any]:
    """Returns the mean of each example's numbers; groups are the same in all lists."""
    first = lists[0]
    if not first or not isinstance(first[0], float):
        return first
    return [sum(each) / len(each) for each in zip(*lists, strict=True)]


if __name__ == "__main__":
    launch.run(main)
