"""Baselines of a classifier by scikit-learn, and the mean of the probabilities of two runs.

    python -m experiments.bench.classifiers --config=configs/fashion_perceiver.py
    python -m experiments.bench.classifiers runs/picture runs/caption runs/both

With a config: accuracy and macro F1 on the test split of classifiers that were fitted to the training split,
prepared as the config says: the most frequent class, nearest neighbours, logistic regression and an MLP on
pixels, bags of tokens or both; character n-grams of texts, boosted trees on boxes. With runs: the accuracy of
each, and of the mean of the probabilities of the first two. Needs pip install 'crossattn[bench]'.
"""

import runpy
import time
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
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
        parser.needs("sklearn", install="crossattn[bench]")
        fit(options.config, options.split)
    else:
        compare(options.runs, options.split, options.step)


def fit(path: str, split: str) -> None:
    """Prints accuracy and macro F1 of each baseline."""
    from sklearn.metrics import f1_score

    task = make_task(read_config(path))
    train, labels = task.vectors("train")
    tests, expected = task.vectors(split)
    print(f"{len(labels)} examples, {len(expected)} of {split}")
    for name, given, model in baselines(train):
        begun = time.perf_counter()
        said = model.fit(given(train), labels).predict(given(tests))
        f1 = f1_score(expected, said, average="macro")
        seconds = time.perf_counter() - begun
        print(f"{name:<48} {np.mean(said == expected):.4f}   F1 {f1:.4f}   {seconds:.0f} s")


def baselines(vectors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Callable, Any]]:
    """Yields (name, function from vectors to inputs, classifier of scikit-learn) of each baseline."""
    from sklearn.dummy import DummyClassifier
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    numbers = [name for name in vectors if name != "words"]

    def side_by_side(split: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([split[name] for name in numbers], 1)

    shown, centred = " and ".join(numbers), StandardScaler(with_std=numbers == ["boxes"])
    logistic = make_pipeline(centred, LogisticRegression(max_iter=200, tol=1e-3))
    perceptron = make_pipeline(
        centred, MLPClassifier((256, 128), early_stopping=True, random_state=0)
    )
    yield "most frequent class", side_by_side, DummyClassifier()
    for name in numbers:
        yield f"nearest {name}", itemgetter(name), KNeighborsClassifier(1)
        yield f"logistic regression on {name}", itemgetter(name), logistic
    if len(numbers) > 1:
        yield f"logistic regression on {shown}", side_by_side, logistic
    yield f"MLP of 256 and 128 units on {shown}", side_by_side, perceptron
    if "boxes" in vectors:
        trees = HistGradientBoostingClassifier(random_state=0)
        yield "boosted trees on boxes", itemgetter("boxes"), trees
    if "words" in vectors:
        grams = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True)
        linear = make_pipeline(grams, LogisticRegression(C=30.0, max_iter=500))
        yield "logistic regression on n-grams of characters", itemgetter("words"), linear


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
