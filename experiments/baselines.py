"""Classifiers that a critic would try first, by scikit-learn, on exactly the examples of a task.

Each kind of classifier is fitted to the training split with a few settings, and the one that is best on the
validation split says the classes of another split. None of them sees the order of a sequence beyond n-grams.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TREES_AT_MOST = 64
"""Numbers of an example above which boosted trees take minutes."""


@dataclass(frozen=True)
class Examples:
    """The examples of a split.

    Attributes:
      views: what is given of each example, by name: numbers [n F], or texts [n] as strings.
      labels: the class of each, [n].
    """

    views: Mapping[str, np.ndarray]
    labels: np.ndarray


def predictions(train: Examples, validation: Examples, other: Examples) -> dict[str, np.ndarray]:
    """Returns the classes [n] that each baseline says for ``other``, by names such as "logistic_picture".

    Raises:
      ModuleNotFoundError: scikit-learn is not installed.
    """
    from sklearn.exceptions import ConvergenceWarning

    most = np.bincount(train.labels).argmax()
    found = {"most_frequent_class": np.full(len(other.labels), most)}
    for view, values in train.views.items():
        kinds = _of_texts() if values.dtype == object else _of_numbers(values.shape[1])
        for kind, candidates in kinds.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # at the limit of iterations
                fitted = [model.fit(values, train.labels) for model in candidates]
            if len(fitted) > 1:
                known = validation.views[view], validation.labels
                fitted.sort(
                    key=lambda model: model.score(*known), reverse=True
                )  # the first stays first
            found[f"{kind}_{view}"] = fitted[0].predict(other.views[view])
    return found


def scores(
    vectors: Callable[[str], tuple[Mapping[str, np.ndarray], np.ndarray]],
    split: str,
    metrics: Mapping[str, Callable[[np.ndarray, np.ndarray], float]],
) -> dict[str, float]:
    """Returns metrics of each baseline on a split, as NAME_METRIC.

    Args:
      vectors: from the name of a split to its views and labels.
      split: the one that is scored; settings are chosen on validation.
      metrics: by name, functions of predicted and true classes.
    """
    train, validation, other = (
        _joined(Examples(*vectors(name))) for name in ("train", "validation", split)
    )
    return {
        f"{name}_{metric}": float(score(said, other.labels))
        for name, said in predictions(train, validation, other).items()
        for metric, score in metrics.items()
    }


def accuracy(said: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of right classes; NaN of no examples."""
    return float(np.mean(said == labels)) if len(labels) else float("nan")


def _joined(examples: Examples) -> Examples:
    """Adds a view of all numbers side by side, if there are several."""
    numbers = {name: x for name, x in examples.views.items() if x.dtype != object}
    if len(numbers) < 2:
        return examples
    name = "_and_".join(numbers)
    views = {**examples.views, name: np.concatenate(list(numbers.values()), 1)}
    return Examples(views, examples.labels)


def _of_numbers(size: int) -> dict[str, list[Any]]:
    from sklearn.base import clone
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def each(*models: Any) -> list[Any]:
        """Centres numbers, which counts and pixels want, or scales them, which boxes want."""
        return [
            make_pipeline(StandardScaler(with_std=scaled), clone(model))
            for model in models
            for scaled in (False, True)
        ]

    def mlp(*hidden: int) -> Any:
        return MLPClassifier(hidden, early_stopping=True, max_iter=60, random_state=0)

    def logistic(c: float) -> Any:
        return LogisticRegression(C=c, max_iter=300, tol=1e-3)

    found = {
        "nearest": each(KNeighborsClassifier(1), KNeighborsClassifier(5)),
        "logistic": each(logistic(0.01), logistic(1.0)),
        "mlp": each(mlp(128), mlp(256, 128)),
    }
    if size <= TREES_AT_MOST:
        found["boosted_trees"] = [
            HistGradientBoostingClassifier(random_state=0, learning_rate=rate)
            for rate in (0.1, 0.3)
        ]
    return found


def _of_texts() -> dict[str, list[Any]]:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import LinearSVC

    def ngrams(most: int) -> Any:
        vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, most), sublinear_tf=True)
        return make_pipeline(vectors, LinearSVC(random_state=0))

    return {"character_ngrams": [ngrams(most) for most in (3, 5)]}
