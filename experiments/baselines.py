"""Classifiers that a critic would try first, by scikit-learn, on exactly the examples of a task.

Each kind of classifier is fitted to the training split with a few settings, and the one that is best on the
validation split says the classes of another split. None of them sees the order of a sequence beyond n-grams.
Where training changes its examples at random, an MLP is also fitted to examples that are changed alike.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TREES_AT_MOST = 64
"""Numbers of an example above which boosted trees take minutes."""
AXES = 32
"""Main axes of a view of more than ``TREES_AT_MOST`` numbers, which trees read in place of them."""
EPOCHS = 20
"""Of the MLP whose examples are changed in each; the best one on validation counts."""

Views = Mapping[str, np.ndarray]
Changed = Callable[[Views, int], Views]
"""From the views of the training split and an epoch to those that training changes, changed at random."""


@dataclass(frozen=True)
class Examples:
    """The examples of a split.

    Attributes:
      views: what is given of each example, by name: numbers [n F], or texts [n] as strings.
      labels: the class of each, [n].
    """

    views: Views
    labels: np.ndarray


def predictions(
    train: Examples, validation: Examples, other: Examples, changed: Changed | None = None
) -> dict[str, np.ndarray]:
    """Returns the classes [n] that each baseline says for ``other``, by names such as "logistic_picture".

    Args:
      train, validation, other: examples of splits.
      changed: adds "mlp_augmented_VIEW", fitted to other rows in each epoch.

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
                threads = 1 if kind == "boosted_trees" else None
                found[f"{kind}_{view}"] = _best(candidates, view, train, validation, other, threads)
    if changed is not None:
        for view, model in _augmented(train, validation, changed).items():
            found[f"mlp_augmented_{view}"] = model.predict(other.views[view])
    return found


def _best(
    candidates: list[Any],
    view: str,
    train: Examples,
    validation: Examples,
    other: Examples,
    threads: int | None = None,
) -> np.ndarray:
    """Returns the classes [n] said by the candidate that is best on validation, the first of equal ones.

    Trees take one thread: several wait for each other, and beside other work take twenty times as long.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(threads):
        fitted = [model.fit(train.views[view], train.labels) for model in candidates]
        if len(fitted) > 1:
            known = validation.views[view], validation.labels
            fitted.sort(key=lambda model: model.score(*known), reverse=True)
        return fitted[0].predict(other.views[view])


def _augmented(train: Examples, validation: Examples, changed: Changed) -> dict[str, Any]:
    """Returns an MLP for each view that training changes, as it was after its best epoch on validation."""
    models: dict[str, Any] = {}
    best: dict[str, tuple[float, Any]] = {}
    classes = np.unique(train.labels)
    for epoch in range(EPOCHS):
        for view, values in changed(train.views, epoch).items():
            if not epoch:
                models[view] = _centred(_mlp(256, 128, early_stopping=False))
                models[view][0].fit(train.views[view])
            scaler, mlp = model = models[view]
            mlp.partial_fit(scaler.transform(values), train.labels, classes=classes)
            score = model.score(validation.views[view], validation.labels)
            if not epoch or score > best[view][0]:
                best[view] = score, copy.deepcopy(model)
    return {view: model for view, (_, model) in best.items()}


def scores(
    vectors: Callable[[str], tuple[Views, np.ndarray]],
    split: str,
    metrics: Mapping[str, Callable[[np.ndarray, np.ndarray], float]],
    changed: Changed | None = None,
) -> dict[str, float]:
    """Returns metrics of each baseline on a split, as NAME_METRIC.

    Args:
      vectors: from the name of a split to its views and labels.
      split: the one that is scored; settings are chosen on validation.
      metrics: by name, functions of predicted and true classes.
      changed: of views, how training changes them; see ``predictions``.
    """
    train, validation, other = (Examples(*vectors(name)) for name in ("train", "validation", split))
    sizes = {name: x.shape[1] for name, x in _numbers(train.views).items()}
    train, validation, other = map(_joined, (train, validation, other))
    found = predictions(train, validation, other, changed)
    kinds = {name: {name: size} for name, size in sizes.items()} | {"_and_".join(sizes): sizes}
    for name, parts in kinds.items():
        if sum(parts.values()) > TREES_AT_MOST:
            models = _narrow_trees(parts)
            found[f"boosted_trees_{name}"] = _best(
                models, name, train, validation, other, threads=1
            )
    return {
        f"{name}_{metric}": float(score(said, other.labels))
        for name, said in found.items()
        for metric, score in metrics.items()
    }


def _narrow_trees(sizes: Mapping[str, int]) -> list[Any]:
    """Returns boosted trees of views of such sizes side by side, which read the main axes of wide ones."""
    from sklearn.compose import make_column_transformer
    from sklearn.decomposition import TruncatedSVD
    from sklearn.pipeline import make_pipeline

    ends = np.cumsum(list(sizes.values())).tolist()
    narrowed = make_column_transformer(
        *(
            (
                TruncatedSVD(AXES, random_state=0) if size > TREES_AT_MOST else "passthrough",
                slice(end - size, end),
            )
            for size, end in zip(sizes.values(), ends, strict=True)
        )
    )
    return [make_pipeline(narrowed, model) for model in _trees()]


def accuracy(said: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of right classes; NaN of no examples."""
    return float(np.mean(said == labels)) if len(labels) else float("nan")


def _joined(examples: Examples) -> Examples:
    """Adds a view of all numbers side by side, if there are several."""
    numbers = _numbers(examples.views)
    if len(numbers) < 2:
        return examples
    name = "_and_".join(numbers)
    views = {**examples.views, name: np.concatenate(list(numbers.values()), 1)}
    return Examples(views, examples.labels)


def _numbers(views: Views) -> dict[str, np.ndarray]:
    return {name: x for name, x in views.items() if x.dtype != object}


def _of_numbers(size: int) -> dict[str, list[Any]]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    def logistic(c: float) -> Any:
        return LogisticRegression(C=c, max_iter=300, tol=1e-3)

    found = {
        "nearest": _centred_and_scaled(KNeighborsClassifier(1), KNeighborsClassifier(5)),
        "logistic": _centred_and_scaled(logistic(0.01), logistic(1.0)),
        "mlp": _centred_and_scaled(_mlp(128), _mlp(256, 128)),
    }
    if size <= TREES_AT_MOST:
        found["boosted_trees"] = _trees()
    return found


def _trees() -> list[Any]:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return [
        HistGradientBoostingClassifier(random_state=0, learning_rate=rate) for rate in (0.1, 0.3)
    ]


def _centred_and_scaled(*models: Any) -> list[Any]:
    """Centres numbers, which counts and pixels want, or scales them, which boxes want."""
    return [_centred(model, scaled) for model in models for scaled in (False, True)]


def _centred(model: Any, scaled: bool = False) -> Any:
    from sklearn.base import clone
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(with_std=scaled), clone(model))


def _mlp(*hidden: int, early_stopping: bool = True) -> Any:
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier(hidden, early_stopping=early_stopping, max_iter=60, random_state=0)


def _of_texts() -> dict[str, list[Any]]:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_pipeline
    from sklearn.svm import LinearSVC

    def ngrams(most: int) -> Any:
        vectors = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, most), sublinear_tf=True)
        return make_pipeline(vectors, LinearSVC(random_state=0))

    return {"character_ngrams": [ngrams(most) for most in (3, 5)]}
