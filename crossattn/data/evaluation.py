"""Finite batches for evaluation: every example once, like lengths together, few shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.encoded import EncodedPairs, encode_pairs
from crossattn.data.errors import DataError
from crossattn.data.packing import Batch, Layout, fill, length_buckets, plan_buckets
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
    """All batches of a source, each made when it is asked for, and how many texts had to be cut."""

    layouts: tuple[Layout, ...]
    encoded: EncodedPairs

    def __len__(self) -> int:
        return len(self.layouts)

    def __getitem__(self, index: int) -> EvalBatch:
        layout = self.layouts[index]
        indices = np.full(layout.rows, -1, np.int64)
        indices[layout.row] = self.encoded.example[layout.pairs]
        return EvalBatch(indices, fill(layout, self.encoded))

    @property
    def examples(self) -> int:
        """How many there are."""
        return len(self.encoded)

    @property
    def cut_sources(self) -> int:
        """Sources that were too long."""
        return self.encoded.cut_sources

    @property
    def cut_targets(self) -> int:
        """Targets that were too long."""
        return self.encoded.cut_targets

    @property
    def shapes(self) -> set[tuple[int, int, int]]:
        """The distinct (rows, source length, target length): one compilation each."""
        return {(layout.rows, layout.source_len, layout.target_len) for layout in self.layouts}


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
    layouts = plan_buckets(order, *lengths, buckets=buckets, rng=None)
    mine = (layout.shard(process_index, process_count) for layout in layouts)
    return EvalBatches(tuple(mine), encoded)
