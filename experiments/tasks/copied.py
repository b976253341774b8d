"""Texts that need no model: targets of the training split, copied whole."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


def copied(train: Sequence[dict[str, Any]], sources: Sequence[str]) -> dict[str, list[str]]:
    """Returns what is written about each source, by name.

    "nearest" is the target of the training source whose words are most like it, "most_frequent" the most
    frequent target, of several the first.

    Raises:
      ModuleNotFoundError: scikit-learn is not installed.
    """
    most, _ = Counter(example["target"] for example in train).most_common(1)[0]
    return {"nearest": nearest(train, sources), "most_frequent": [most] * len(sources)}


def nearest(train: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[Any]:
    """Returns for each text the target of the training source with the largest cosine of words' tf-idf.

    Raises:
      ModuleNotFoundError: scikit-learn is not installed.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    known = list(train)
    vectors = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+")
    table = vectors.fit_transform([example["source"] for example in known])
    alike: Any = vectors.transform(texts) @ table.T  # of unit vectors
    return [known[row]["target"] for row in np.asarray(alike.argmax(axis=1)).ravel()]
