"""Batches taken, joined and compared."""

import numpy as np


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def joined(iterators, count):
    """The next so many global batches of the processes that train together."""
    steps = [[next(iterator) for iterator in iterators] for _ in range(count)]
    return [{k: np.concatenate([part[k] for part in step]) for k in step[0]} for step in steps]


def same(left, right) -> bool:
    return len(left) == len(right) and all(
        a.keys() == b.keys()
        and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)
        for a, b in zip(left, right, strict=True)
    )
