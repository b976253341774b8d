"""What a classifier must beat: the most frequent class and logistic regression; and runs averaged afterwards.

    python -m experiments.bench.classifiers --config=configs/fashion_perceiver.py
    python -m experiments.bench.classifiers runs/picture runs/caption runs/both

A config: accuracies on its test split of what was fitted to all of its training split, prepared as the config
says: logistic regression on the pixels, the bag of tokens, or both side by side. Runs: the accuracy of each,
and of the mean of the probabilities of the first two. Needs scikit-learn: pip install 'crossattn[bench]'.
"""

import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.train.storage import folder
from experiments.options import Options
from experiments.runs import parameters
from experiments.settings import check, saved_config
from experiments.tasks import make_task


def main() -> None:
    """Compare and print."""
    parser = Options(__doc__)
    parser.add_argument("runs", nargs="*", help="work directories of runs on the same data")
    parser.add_argument("--config", metavar="FILE", help="a config, FILE[:ARGUMENT]")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    parser.add_argument(
        "--step", default="last", metavar="STEP", help="of the runs: a step, 'last' or 'best'"
    )
    options = parser.parse_args()
    if bool(options.runs) == bool(options.config):
        parser.error("expected --config, or runs.")
    if options.config:
        parser.needs("sklearn", install="crossattn[bench]")
        fit(options.config, options.split)
    else:
        compare(options.runs, options.split, options.step)


def fit(path: str, split: str) -> None:
    """Print accuracies of the most frequent class and of logistic regression."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    task = make_task(read_config(path))
    (x, labels), (tests, expected) = (_arrays(task, name) for name in ("train", split))
    frequent = np.bincount(labels).argmax()
    print(f"{len(labels)} examples, {len(expected)} of {split}, {x.shape[1]} features")
    print(f"most frequent class   {np.mean(expected == frequent):.4f}")
    begun, scaler = time.perf_counter(), StandardScaler(with_std=False).fit(x)
    model = LogisticRegression(max_iter=200, tol=1e-3).fit(scaler.transform(x), labels)
    accuracy = np.mean(model.predict(scaler.transform(tests)) == expected)
    print(f"logistic regression   {accuracy:.4f}   {time.perf_counter() - begun:.0f} s")


def compare(runs: list[str], split: str, step: str) -> None:
    """Print accuracies of runs, and of the first two together."""
    tables = []
    for run in runs:
        workdir = folder(run)
        config = saved_config(workdir)
        check(config)
        task = make_task(config, workdir / "assets")
        probabilities, classes = task.probabilities(parameters(task, workdir, step), split)
        tables.append(probabilities)
        print(f"{run}   {np.mean(probabilities.argmax(-1) == classes):.4f}")
    if len(runs) > 1:
        mean = (tables[0] + tables[1]) / 2
        print(f"mean of {runs[0]} and {runs[1]}   {np.mean(mean.argmax(-1) == classes):.4f}")


def read_config(path: str) -> Any:
    """The config of a file, as --config of the launchers has it."""
    file, _, argument = path.partition(":")
    spec = importlib.util.spec_from_file_location("config", Path(file))
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise SystemExit(f"error: --config names {file}, which is no file of a config.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(argument)
    check(config)
    return config


def _arrays(task: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Features [n F] and classes [n] of a split: pixels, then how often each token comes."""
    vectors, classes = task.vectors(split)
    return np.concatenate(list(vectors.values()), 1), classes


if __name__ == "__main__":
    main()
