"""Baselines of a task by scikit-learn, and the mean of the probabilities of two runs.

    python -m experiments.bench.classifiers --config=configs/fashion_perceiver.py
    python -m experiments.bench.classifiers runs/picture runs/caption runs/both

With a config: scores of ``task.baselines``, see ``experiments.baselines``. With runs: the accuracy of each,
and of the mean of the probabilities of the first two. Needs pip install 'crossattn[baselines]'.
"""

import runpy
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.train.storage import folder
from experiments.options import Options
from experiments.runs import parameters
from experiments.settings import check, saved_config
from experiments.tasks import make_task


def main() -> None:
    """Compares and prints."""
    parser = Options(__doc__)
    parser.add_argument("runs", nargs="*", help="work directories of runs on the same data")
    parser.add_argument("--config", metavar="FILE", help="a config, FILE[:ARGUMENT]")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    parser.add_argument("--step", default="last", metavar="STEP", help="a step, 'last' or 'best'")
    options = parser.parse_args()
    if bool(options.runs) == bool(options.config):
        parser.error("expected either --config or runs.")
    if options.config:
        parser.needs("sklearn", install="crossattn[baselines]")
        fit(options.config, options.split)
    else:
        compare(options.runs, options.split, options.step)


def fit(path: str, split: str) -> None:
    """Prints the scores of each baseline."""
    found = make_task(read_config(path)).baselines(split)
    for name, score in found.items():
        print(f"{name:<48} {score:.4f}")


def compare(runs: list[str], split: str, step: str) -> None:
    """Prints the accuracy of each run, and of the mean of the first two."""
    tables = []
    for run in runs:
        task, params = open_run(run, step)
        probabilities, classes = task.probabilities(params, split)
        tables.append(probabilities)
        print(f"{run}   {np.mean(probabilities.argmax(-1) == classes):.4f}")
    if len(runs) > 1:
        mean = (tables[0] + tables[1]) / 2
        print(f"mean of {runs[0]} and {runs[1]}   {np.mean(mean.argmax(-1) == classes):.4f}")


def open_run(run: str, step: str) -> tuple[Any, Any]:
    """Returns the task and the parameters of a run."""
    workdir = folder(run)
    config = saved_config(workdir)
    check(config)
    task = make_task(config, workdir / "assets")
    return task, parameters(task, workdir, step)


def read_config(path: str) -> Any:
    """Reads the config of FILE[:ARGUMENT], as --config of the launchers does."""
    file, _, argument = path.partition(":")
    if not Path(file).is_file():
        raise SystemExit(f"error: got --config={path}; expected the file of a config.")
    config = runpy.run_path(file)["get_config"](argument)
    check(config)
    return config


if __name__ == "__main__":
    main()
