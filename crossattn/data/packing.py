"""Layouts of batches: planned from lengths alone, then filled by copying.

An example may have several lengths, such as those of its source and its target; a row has a width for each,
by the same names. Plans depend neither on the number of processes nor on that of devices, and each process
fills its own rows, so a run sees the same examples in every batch on any number of processes.

grain's own `FirstFitPackIterDataset` packs one example at a time and needs one shape; planning a window of
examples at once fills rows as well, costs less, and serves length buckets too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from crossattn.data.errors import DataError

Batch = dict[str, np.ndarray]
Lengths = Mapping[str, Int[np.ndarray, " examples"]]
"""Lengths of some examples, by name."""


@dataclass(frozen=True)
class Layout:
    """A batch's static shape, and the row, places and segment number of each of its examples.

    Attributes:
        rows: of the batch.
        widths: lengths of a row, by name.
        examples: the numbers of the examples in the batch.
        row: of each.
        starts: the place of each in its row, by the same names.
        segment: the number of each among those of its row, from 1.
    """

    rows: int
    widths: Mapping[str, int]
    examples: Int[np.ndarray, " examples"]
    row: Int[np.ndarray, " examples"]
    starts: Lengths
    segment: Int[np.ndarray, " examples"]

    def shard(self, index: int, count: int, multiple: int = 1) -> "Layout":
        """Returns the rows of process `index` of `count`: a contiguous block, equally many each.

        Empty rows at the end make the rows of all together a multiple of `multiple` and of `count`.
        """
        multiple = int(np.lcm(count, multiple))
        rows = -(-self.rows // multiple) * multiple // count
        mine = self.only((self.row >= index * rows) & (self.row < (index + 1) * rows))
        return replace(mine, rows=rows, row=mine.row - index * rows)

    def only(self, some: Bool[np.ndarray, " examples"]) -> "Layout":
        """Returns the same rows with some of the examples."""
        starts = {name: start[some] for name, start in self.starts.items()}
        return Layout(
            self.rows, self.widths, self.examples[some], self.row[some], starts, self.segment[some]
        )

    @classmethod
    def empty(cls, rows: int, widths: Mapping[str, int]) -> "Layout":
        """Returns rows without an example."""
        none = np.zeros(0, np.int64)
        return cls(rows, widths, none, none, dict.fromkeys(widths, none), none)


def rows_multiple(batch_size: int, process_count: int, batch_multiple: int = 1) -> int:
    """Returns the number that divides the rows of every global batch.

    Raises:
        DataError: batch_size is no positive multiple of it.
    """
    multiple = int(np.lcm(process_count, batch_multiple))
    if batch_size < 1 or batch_size % multiple:
        raise DataError(
            f"batch_size is {batch_size}; expected a positive multiple of {multiple} (processes and mesh)"
        )
    return multiple


def lay(
    layout: Layout,
    name: str,
    values: Mapping[str, Sequence[np.ndarray]],
    dtype: type = np.int32,
    shape: tuple[int, ...] = (),
) -> Batch:
    """Returns arrays [rows, width, ...] of the values of length `name`, and the example at each place.

    Args:
        layout: of the batch.
        name: of the length.
        values: by the names of the arrays, the values [length, ...] of the layout's examples, in its order;
            those of an example are equally long in all arrays.
        dtype, shape: of a value at one place.

    Raises:
        DataError: an example reaches over the end of its row; it was shorter when the layout was planned.

    Returns:
        The arrays, 0 at empty places; "NAME_segment_ids" [rows, width], the number of the example, 0 where
        there is none; "NAME_positions" [rows, width], places from the beginning of the example.
    """
    width, (first, *_) = layout.widths[name], values.values()
    sizes = np.fromiter(map(len, first), np.int64, count=len(first))
    if (layout.starts[name] + sizes > width).any():
        raise DataError(
            f"{name} is longer than when it was measured; examples must stay as they are"
        )
    positions = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    places = np.repeat(layout.row * width + layout.starts[name], sizes) + positions

    def laid(what: np.ndarray | Sequence[np.ndarray], dtype: type, shape: tuple[int, ...]):
        array = np.zeros((layout.rows * width, *shape), dtype)
        if len(places):
            array[places] = what if isinstance(what, np.ndarray) else np.concatenate(what)
        return array.reshape(layout.rows, width, *shape)

    batch = {array: laid(each, dtype, shape) for array, each in values.items()}
    batch[f"{name}_segment_ids"] = laid(np.repeat(layout.segment, sizes), np.int32, ())
    batch[f"{name}_positions"] = laid(positions, np.int32, ())
    return batch


def stack(
    layout: Layout, values: Sequence[np.ndarray] | np.ndarray, dtype: type, shape: tuple[int, ...]
) -> np.ndarray:
    """Returns the values [...] of a layout's examples, one a row: [rows, ...], 0 in empty rows."""
    array = np.zeros((layout.rows, *shape), dtype)
    for row, value in zip(layout.row.tolist(), values, strict=True):
        array[row] = value
    return array


def plan_packed(
    examples: Int[np.ndarray, " examples"],
    lengths: Lengths,
    *,
    rows: int,
    widths: Mapping[str, int],
    rng: np.random.Generator,
) -> list[Layout]:
    """Plans batches of one shape, several examples a row: first fit, longest first, rows shuffled.

    The last batch may have empty rows. (First-fit decreasing: Johnson 1973.)
    """
    sizes = [lengths[name] for name in widths]
    fullness = [size / width for size, width in zip(sizes, widths.values(), strict=True)]
    order = np.argsort(-np.maximum.reduce(fullness), kind="stable")
    row, segment = np.zeros(len(examples), np.int64), np.zeros(len(examples), np.int64)
    starts = [np.zeros(len(examples), np.int64) for _ in widths]
    # The space left in every row that might be opened.
    lefts = [np.full(len(examples), width) for width in widths.values()]
    least = [size.min(initial=width) for size, width in zip(sizes, widths.values(), strict=True)]
    listed = [size.tolist() for size in sizes]  # whose items cost less than those of arrays
    sides = list(zip(starts, lefts, listed, widths.values(), least, strict=True))
    examples_in, full = [0] * len(examples), [False] * (len(examples) + 1)
    opened = first_open = 0
    for i in order.tolist():
        fits: Any = True
        for _, left, size, _, _ in sides:
            fits &= left[first_open : opened + 1] >= size[i]
        r = first_open + int(fits.argmax())
        opened = max(opened, r + 1)
        examples_in[r] += 1
        row[i], segment[i] = r, examples_in[r]
        for start, left, size, width, shortest in sides:
            start[i] = width - left[r]
            left[r] -= size[i]
            full[r] |= bool(left[r] < shortest)
        # Rows at the front that can take nothing any more need not be looked at again.
        while full[first_open]:
            first_open += 1
    row = rng.permutation(opened)[row]
    layouts = []
    by_batch = np.argsort(row // rows, kind="stable")
    bounds = np.searchsorted((row // rows)[by_batch], np.arange(-(-opened // rows) + 1))
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        mine = by_batch[start:end]
        places = {name: start[mine] for name, start in zip(widths, starts, strict=True)}
        layouts.append(
            Layout(rows, widths, examples[mine], row[mine] % rows, places, segment[mine])
        )
    return layouts


@dataclass(frozen=True)
class Bucket:
    """A shape of batches for examples of at most these lengths."""

    rows: int
    widths: Mapping[str, int]


def length_buckets(
    rows: int,
    widths: Mapping[str, int],
    *,
    multiple: int = 1,
    fractions: Sequence[float] = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625),
    same_rows: bool = False,
) -> list[Bucket]:
    """Returns shapes of about rows x the longest width tokens, a fraction of the widths each, ascending.

    Args:
        rows: of the longest ones.
        widths: the greatest lengths.
        multiple: every row count is one of its multiples.
        fractions: from 1 down; more of them pad less and compile more.
        same_rows: as many rows of short ones, for batches with other arrays of a fixed size.
    """
    shapes: dict[tuple[int, ...], Bucket] = {}
    longest = max(widths.values(), default=1)
    for fraction in fractions:
        # Multiples of 8 suit every device, and merge buckets that would hardly differ.
        shape = tuple(min(-(-int(n * fraction) // 8) * 8, n) for n in widths.values())
        budget = rows if same_rows else rows * longest // max(*shape, 1, 1)
        named = dict(zip(widths, shape, strict=True))
        shapes.setdefault(shape, Bucket(max(budget // multiple, 1) * multiple, named))
    return list(shapes.values())[::-1]


def plan_buckets(
    examples: Int[np.ndarray, " examples"],
    lengths: Lengths,
    *,
    buckets: Sequence[Bucket],
    rng: np.random.Generator | None,
    order: np.random.Generator | None = None,
) -> list[Layout]:
    """Plans batches of like lengths, one example a row, shuffled; in ascending order without `rng`.

    `buckets` ascend; an example is in the first one that holds it. `order` decides which bucket is when, or
    else `rng` does, which decides the examples of each.
    """
    place, layouts = np.zeros(len(examples), np.int64), []
    for name, sizes in lengths.items():
        widths = [bucket.widths[name] for bucket in buckets]
        place = np.maximum(place, np.searchsorted(widths, sizes))
    for index, bucket in enumerate(buckets):
        mine = np.flatnonzero(place == index)
        if rng is not None:
            mine = rng.permutation(mine)
        for start in range(0, len(mine), bucket.rows):
            chosen = examples[mine[start : start + bucket.rows]]
            zeros, ones = np.zeros(len(chosen), np.int64), np.ones(len(chosen), np.int64)
            starts = dict.fromkeys(bucket.widths, zeros)
            rows = np.arange(len(chosen))
            layouts.append(Layout(bucket.rows, bucket.widths, chosen, rows, starts, ones))
    if rng is not None:
        layouts = [layouts[i] for i in (order or rng).permutation(len(layouts))]
    return layouts
