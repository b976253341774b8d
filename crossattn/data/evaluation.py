"""Finite batches for evaluation: every example once, like lengths together, few shapes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.encoded import encode_pairs
from crossattn.data.errors import DataError
from crossattn.data.packing import Batch, fill, length_buckets, plan_buckets
from crossattn.data.tokenizers import Tokenizer

# A model is compiled for each shape, which in an evaluation costs more than padding does.
FRACTIONS = (1.0, 0.5, 0.25)
"""Of the lengths, those that batches come in."""


@dataclass(frozen=True)
class EvalBatch:
    """A batch and the index in the source of each row's example, -1 for rows of padding."""

    indices: Int[np.ndarray, " rows"]
    batch: Batch


@dataclass(frozen=True)
class EvalBatches(Sequence):
    """All batches of a source, and how many of its texts had to be cut."""

    batches: tuple[EvalBatch, ...]
    examples: int
    cut_sources: int
    cut_targets: int

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> EvalBatch:
        return self.batches[index]

    def __iter__(self) -> Iterator[EvalBatch]:
        return iter(self.batches)

    @property
    def shapes(self) -> set[tuple[int, int, int]]:
        """The distinct (rows, source length, target length): one compilation each."""
        found = set()
        for item in self.batches:
            rows, target_len = item.batch["target_in"].shape
            source = item.batch.get("source")
            found.add((rows, 0 if source is None else source.shape[1], target_len))
        return found


def eval_batches(
    source: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    target_tokenizer: Tokenizer | None = None,
    rows: int = 16,
    source_len: int = 128,
    target_len: int = 128,
    side: str = "both",
    process_index: int = 0,
    process_count: int = 1,
    rows_multiple: int = 1,
) -> EvalBatches:
    """Batches holding every example once; texts that are too long are cut and counted.

    Batches hold about rows x length tokens in one of three shapes and come in order of
    length. Rows are of the global batch; a process gets its block of them.

    Raises:
        DataError: the source is empty or an option is out of range.
    """
    multiple = int(np.lcm(process_count, rows_multiple))
    if rows < 1 or rows % multiple:
        raise DataError(
            f"rows is {rows}; expected a positive multiple of {multiple} (processes and mesh)"
        )
    encoded = encode_pairs(
        source,
        tokenizer,
        target_tokenizer=target_tokenizer,
        source_len=source_len,
        target_len=target_len,
        overlong="cut",
        side=side,
    )
    # Sorted before planning: rows of one batch are alike, and the longest of a decoding batch is no
    # straggler.
    order = np.lexsort((encoded.target_lengths, encoded.source_lengths))
    buckets = length_buckets(
        rows,
        source_len if side == "both" else 0,
        target_len,
        multiple=multiple,
        fractions=FRACTIONS,
    )
    lengths = (encoded.source_lengths[order], encoded.target_lengths[order])
    batches = []
    for layout in plan_buckets(order, *lengths, buckets=buckets, rng=None):
        mine = layout.shard(process_index, process_count)
        indices = np.full(mine.rows, -1, np.int64)
        indices[mine.row] = encoded.example[mine.pairs]
        batches.append(EvalBatch(indices, fill(mine, encoded)))
    return EvalBatches(tuple(batches), len(encoded), encoded.cut_sources, encoded.cut_targets)
