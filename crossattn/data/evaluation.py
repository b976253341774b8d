"""Finite batches for evaluation: every example once, like lengths together, few shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from crossattn.data.examples import FeatureExamples
from crossattn.data.features import Feature
from crossattn.data.packing import Batch, Layout, length_buckets, plan_buckets, rows_multiple
from crossattn.data.pairs import pair_examples, pair_features
from crossattn.data.prepared import Prepared, prepare_examples
from crossattn.data.tokenizers import Tokenizer

FRACTIONS = (1.0, 0.5, 0.25)
"""Fractions of the greatest lengths that batches have; a model is compiled for each shape."""


@dataclass(frozen=True)
class EvalBatch:
    """A batch and the index in the source of each row's example, -1 for rows of padding."""

    indices: Int[np.ndarray, " rows"]
    batch: Batch


@dataclass(frozen=True)
class EvalBatches(Sequence):
    """All batches of a source, each made when it is asked for."""

    layouts: tuple[Layout, ...]
    encoded: Prepared | FeatureExamples

    def __len__(self) -> int:
        return len(self.layouts)

    def __getitem__(self, index: int) -> EvalBatch:
        layout = self.layouts[index]
        indices = np.full(layout.rows, -1, np.int64)
        indices[layout.row] = self.encoded.example[layout.examples]
        batch = self.encoded.fill(layout)
        if "valid" in batch:  # but for what could not be read
            indices[batch["valid"] == 0] = -1
        return EvalBatch(indices, batch)

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(self.encoded)

    @property
    def cut(self) -> Mapping[str, int]:
        """The number of values that were too long, by their names."""
        return self.encoded.cut

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The distinct (rows, lengths of a row): one compilation each."""
        return {(layout.rows, *layout.widths.values()) for layout in self.layouts}


def eval_batches(
    source: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    target_tokenizer: Tokenizer | None = None,
    source_len: int = 128,
    target_len: int = 128,
    side: str = "both",
    **batching: int,
) -> EvalBatches:
    """Returns batches of text pairs holding every example once; texts that are too long are cut and counted.

    Batches hold about rows x length tokens in one of three shapes and come in order of
    length. Rows are of the global batch; a process gets its block of them.

    Args:
        source, tokenizer, target_tokenizer, source_len, target_len, side: as `pair_features` has them.
        batching: batch_size, process_index, process_count, batch_multiple, as `make_train_iterator` has them.

    Raises:
        DataError: the source is empty or an option is out of range.
    """
    features = pair_features(
        tokenizer, target_tokenizer, source_len=source_len, target_len=target_len, side=side
    )
    return _batches(prepare_examples(pair_examples(source, side), features, "cut"), **batching)


def feature_eval_batches(
    examples: Sequence[dict[str, Any]],
    features: Mapping[str, Feature],
    *,
    cache_mib: int = 0,
    **batching: int,
) -> EvalBatches:
    """Returns batches of features holding every example once; values that are too long are cut.

    They come in order of length, in up to three shapes; with a feature of a fixed size every shape has as
    many rows. Examples are prepared when their batch is asked for.

    Args:
        examples, features, cache_mib: as `pipeline.feature_batches` has them.
        batching: as `eval_batches` has it.

    Raises:
        DataError: there are no examples, or an option is out of range; and when a batch is made, an
            example is wrong.
    """
    return _batches(FeatureExamples(examples, features, "cut", cache_mib), **batching)


def _batches(
    encoded: Prepared | FeatureExamples,
    *,
    batch_size: int = 16,
    process_index: int = 0,
    process_count: int = 1,
    batch_multiple: int = 1,
) -> EvalBatches:
    multiple = rows_multiple(batch_size, process_count, batch_multiple)
    every = np.arange(len(encoded))
    lengths = encoded.lengths_of(every)
    if lengths:
        # Sorted before planning: rows of one batch are alike, and the longest of a decoding batch is
        # no straggler.
        every = np.lexsort([lengths[name] for name in reversed(encoded.widths)])
        lengths = {name: sizes[every] for name, sizes in lengths.items()}
    buckets = length_buckets(
        batch_size,
        encoded.widths,
        multiple=multiple,
        fractions=FRACTIONS,
        same_rows=bool(encoded.stacked),
    )
    layouts = plan_buckets(every, lengths, buckets=buckets, rng=None)
    mine = (layout.shard(process_index, process_count) for layout in layouts)
    return EvalBatches(tuple(mine), encoded)
