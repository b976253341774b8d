"""What the pictures refuse, each with one sentence: rank, NaN, counts, links out of range."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def checked_weights(
    weights: ArrayLike, axes: str, name: str = "weights", *, or_axes: str = ""
) -> np.ndarray:
    """Returns weights as float64 numpy, of the rank of `axes` (or of `or_axes`), all finite."""
    array = np.asarray(weights)
    ranks = {len(a.split(",")) for a in (axes, or_axes) if a}
    wanted = f"[{axes}]" + (f" or [{or_axes}]" if or_axes else "")
    if array.ndim not in ranks:
        raise ValueError(
            f"{name} has shape {list(array.shape)} but {wanted} is expected; "
            f"take one sentence of the batch, and one head or the mean of the heads as needed"
        )
    if array.size == 0:
        raise ValueError(f"{name} has shape {list(array.shape)}: there is nothing to draw")
    if np.issubdtype(array.dtype, np.complexfloating):
        raise ValueError(f"{name} is complex ({array.dtype}) but real numbers are expected")
    try:
        array = array.astype(np.float64)  # bfloat16 and friends have no NaN test of their own
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} has dtype {array.dtype} but numbers are expected") from error
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        raise ValueError(
            f"{name} has {len(bad)} NaN or infinite values, the first at {bad[0].tolist()}; "
            f"draw the weights after the softmax, where every number is finite"
        )
    return array


def checked_tokens(
    weights: np.ndarray,
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    which: str = "",
) -> None:
    """Refuses tokens whose number is not the number of columns (source) or rows (target)."""
    rows, columns = weights.shape[-2:]
    for name, tokens, count, axis in (
        ("source_tokens", source_tokens, columns, "columns (S)"),
        ("target_tokens", target_tokens, rows, "rows (T)"),
    ):
        if len(tokens) != count:
            swapped = (len(target_tokens), len(source_tokens)) == (columns, rows)
            advice = "are the two swapped?" if swapped else "cut both to the same length"
            raise ValueError(
                f"{name}{which} has {len(tokens)} entries but weights{which} has {count} {axis}; "
                f"{advice}"
            )
        for i, token in enumerate(tokens):
            if not isinstance(token, str):
                raise ValueError(
                    f"{name}{which}[{i}] is {token!r} but a string is expected; decode ids first"
                )


def checked_links(
    links: Iterable[Any] | None, shape: tuple[int, ...], name: str = "links"
) -> np.ndarray:
    """Returns links as an int array [k, 2] of (source, target) places inside weights."""
    if links is None:
        return np.zeros((0, 2), int)
    listed = list(links)
    try:
        pairs = np.asarray([tuple(link) for link in listed]).reshape(len(listed), -1)
    except (TypeError, ValueError):
        pairs = np.zeros((1, 0))
    if not listed:
        return np.zeros((0, 2), int)
    if pairs.shape[1] != 2 or not np.issubdtype(pairs.dtype, np.integer):
        raise ValueError(f"{name} must be (source, target) pairs of integers, got {listed[0]!r}")
    rows, columns = shape
    outside = (pairs < 0) | (pairs >= [columns, rows])
    if outside.any():
        source, target = pairs[outside.any(axis=1)][0].tolist()
        raise ValueError(
            f"{name} has ({source}, {target}) but there are {columns} source and {rows} target "
            f"tokens, counted from 0; links are (source, target)"
        )
    return pairs.astype(int)


def checked_panel_lists(**lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Zips the lists of a gallery; refuses lists of different lengths and an empty gallery."""
    counts = {name: len(entries) for name, entries in lists.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ValueError(f"a gallery needs one entry a sentence in every list, got {said}")
    if not counts["weights"]:
        raise ValueError("a gallery needs at least one sentence, got none")
    return list(zip(*lists.values(), strict=True))


def checked_count(count: int | None, name: str, *, default: int) -> int:
    """Returns count, or the default for None; refuses less than 1."""
    if count is not None and count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")
    return default if count is None else count
