"""Which example goes where: batches planned from lengths alone, then filled by copying.

Pure functions. Plans are global (all processes make the same ones, and know neither their number
nor that of their devices) and each process fills its own rows, so a run sees the same examples in
every batch on any number of processes.

grain's own `FirstFitPackIterDataset` packs one example at a time and needs one shape; planning a
window of examples at once fills rows as well, costs less, serves length buckets too, and cuts into
rows by process.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from crossattn.data.encoded import EncodedPairs
from crossattn.data.links import LINKS_PER_TOKEN

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Layout:
    """One batch: its static shape, and for each example the row, offsets and segment number."""

    rows: int
    source_len: int
    target_len: int
    pairs: Int[np.ndarray, " examples"]
    row: Int[np.ndarray, " examples"]
    source_start: Int[np.ndarray, " examples"]
    target_start: Int[np.ndarray, " examples"]
    segment: Int[np.ndarray, " examples"]

    def shard(self, index: int, count: int, multiple: int = 1) -> "Layout":
        """The rows of process `index` of `count`: a contiguous block, equally many each.

        Empty rows at the end make the rows of all together a multiple of `multiple` and of `count`.
        """
        multiple = int(np.lcm(count, multiple))
        rows = -(-self.rows // multiple) * multiple // count
        mine = (self.row >= index * rows) & (self.row < (index + 1) * rows)
        return Layout(
            rows,
            self.source_len,
            self.target_len,
            self.pairs[mine],
            self.row[mine] - index * rows,
            self.source_start[mine],
            self.target_start[mine],
            self.segment[mine],
        )


def fill(layout: Layout, encoded: EncodedPairs) -> Batch:
    """The batch of a layout: int32 arrays [rows, length], 0 wherever nothing stands.

    With gold links also `target_linked`, 1 where those of the pair are known; `target_links`
    [rows, length, LINKS_PER_TOKEN]: for each token that `target_in` holds, the places of its source
    tokens in the row of `source`; the rest is -1; and `linked_words`, the number of the word in its
    text of each linked token of `source`.
    """
    batch: Batch = {
        name: np.zeros((layout.rows, layout.target_len), np.int32)
        for name in ("target_in", "target_out", "target_segments", "target_positions")
    }
    if encoded.source is not None:
        for name in ("source", "source_segments", "source_positions"):
            batch[name] = np.zeros((layout.rows, layout.source_len), np.int32)
    if encoded.links is not None:
        batch["target_linked"] = np.zeros((layout.rows, layout.target_len), np.int32)
        shape = (layout.rows, layout.target_len, LINKS_PER_TOKEN)
        batch["target_links"] = np.full(shape, -1, np.int32)
        batch["linked_words"] = np.zeros((layout.rows, layout.source_len), np.int32)
    count = np.arange(max(layout.source_len, layout.target_len), dtype=np.int32)
    placements = zip(
        layout.pairs.tolist(),
        layout.row.tolist(),
        layout.source_start.tolist(),
        layout.target_start.tolist(),
        layout.segment.tolist(),
        strict=True,
    )
    for pair, row, source_start, target_start, segment in placements:
        ids = encoded.target[pair]
        size = len(ids) - 1
        span = slice(target_start, target_start + size)
        batch["target_in"][row, span] = ids[:-1]
        batch["target_out"][row, span] = ids[1:]
        batch["target_segments"][row, span] = segment
        batch["target_positions"][row, span] = count[:size]
        if encoded.source is not None:
            ids = encoded.source[pair]
            span = slice(source_start, source_start + len(ids))
            batch["source"][row, span] = ids
            batch["source_segments"][row, span] = segment
            batch["source_positions"][row, span] = count[: len(ids)]
        if encoded.links is not None:
            target, rank, place, word = encoded.links[pair].T
            batch["target_links"][row, target_start + target, rank] = source_start + place
            batch["linked_words"][row, source_start + place] = word
            span = slice(target_start, target_start + size)
            batch["target_linked"][row, span] = encoded.links.known[pair]
    return batch


def plan_packed(
    pairs: Int[np.ndarray, " examples"],
    source_lengths: Int[np.ndarray, " examples"],
    target_lengths: Int[np.ndarray, " examples"],
    *,
    rows: int,
    source_len: int,
    target_len: int,
    rng: np.random.Generator,
) -> list[Layout]:
    """Batches of one shape, several examples a row: first fit, longest first, rows shuffled.

    The last batch may have empty rows. (First-fit decreasing: Johnson 1973.)
    """
    fullness = np.maximum(source_lengths / max(source_len, 1), target_lengths / target_len)
    order = np.argsort(-fullness, kind="stable")
    row, source_start, target_start, segment = (np.zeros(len(pairs), np.int64) for _ in range(4))
    # The space left in every row that might be opened.
    source_left = np.full(len(pairs), source_len)
    target_left = np.full(len(pairs), target_len)
    examples_in = np.zeros(len(pairs), np.int64)
    opened = first_open = 0
    for i in order:
        s, t = source_lengths[i], target_lengths[i]
        fits = (source_left[first_open : opened + 1] >= s) & (
            target_left[first_open : opened + 1] >= t
        )
        r = first_open + int(fits.argmax())
        opened = max(opened, r + 1)
        row[i], segment[i] = r, examples_in[r] + 1
        source_start[i], target_start[i] = source_len - source_left[r], target_len - target_left[r]
        source_left[r] -= s
        target_left[r] -= t
        examples_in[r] += 1
        # Rows at the front that can take nothing any more need not be looked at again.
        while first_open < opened and target_left[first_open] < 2:
            first_open += 1
    row = rng.permutation(opened)[row]
    layouts = []
    by_batch = np.argsort(row // rows, kind="stable")
    bounds = np.searchsorted((row // rows)[by_batch], np.arange(-(-opened // rows) + 1))
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        mine = by_batch[start:end]
        places = (row[mine] % rows, source_start[mine], target_start[mine], segment[mine])
        layouts.append(Layout(rows, source_len, target_len, pairs[mine], *places))
    return layouts


@dataclass(frozen=True)
class Bucket:
    """A batch shape for examples of at most these lengths."""

    rows: int
    source_len: int
    target_len: int


def length_buckets(
    rows: int,
    source_len: int,
    target_len: int,
    *,
    multiple: int = 1,
    fractions: Sequence[float] = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625),
) -> list[Bucket]:
    """Shapes of about rows x the longer length tokens, one for each fraction of the lengths.

    Args:
        multiple: every row count is one of its multiples.
        fractions: from 1 down; more of them pad less and compile more.
    """
    shapes: dict[tuple[int, int], Bucket] = {}
    for fraction in fractions:
        # Multiples of 8 suit every device, and merge buckets that would hardly differ.
        s, t = (min(-(-int(n * fraction) // 8) * 8, n) for n in (source_len, target_len))
        budget = rows * max(source_len, target_len) // max(s, t, 1)
        shapes.setdefault((s, t), Bucket(max(budget // multiple, 1) * multiple, s, t))
    return list(shapes.values())[::-1]


def bucket_of(
    source_lengths: Int[np.ndarray, " examples"],
    target_lengths: Int[np.ndarray, " examples"],
    buckets: Sequence[Bucket],
) -> Int[np.ndarray, " examples"]:
    """Index of the first bucket (they are in ascending order) that holds each example."""
    by_source = np.searchsorted([bucket.source_len for bucket in buckets], source_lengths)
    by_target = np.searchsorted([bucket.target_len for bucket in buckets], target_lengths)
    return np.maximum(by_source, by_target)


def plan_buckets(
    pairs: Int[np.ndarray, " examples"],
    source_lengths: Int[np.ndarray, " examples"],
    target_lengths: Int[np.ndarray, " examples"],
    *,
    buckets: Sequence[Bucket],
    rng: np.random.Generator | None,
) -> list[Layout]:
    """Batches of like lengths, one example a row, shuffled; in ascending order without `rng`."""
    place = bucket_of(source_lengths, target_lengths, buckets)
    layouts = []
    for index, bucket in enumerate(buckets):
        mine = np.flatnonzero(place == index)
        if rng is not None:
            mine = rng.permutation(mine)
        for start in range(0, len(mine), bucket.rows):
            chosen = pairs[mine[start : start + bucket.rows]]
            zeros, ones = np.zeros(len(chosen), np.int64), np.ones(len(chosen), np.int64)
            shape = (bucket.rows, bucket.source_len, bucket.target_len)
            layouts.append(Layout(*shape, chosen, np.arange(len(chosen)), zeros, zeros, ones))
    if rng is not None:
        layouts = [layouts[i] for i in rng.permutation(len(layouts))]
    return layouts
