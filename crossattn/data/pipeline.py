"""Training batches without end, in an order that a seed fixes and a small state resumes exactly.

Pairs of texts are tokenised once, examples of features prepared one by one. grain shuffles their indices anew
each epoch and cuts the stream into windows; each window becomes a list of batch layouts, and a batch is
filled when it is asked for. The state is a place in the stream of windows, so it stays a few numbers and does
not depend on prefetching.
"""

import contextlib
import functools
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.evaluation import EvalBatch, EvalBatches, eval_batches, feature_eval_batches
from crossattn.data.examples import FeatureExamples
from crossattn.data.features import Feature
from crossattn.data.packing import (
    Batch,
    Bucket,
    Layout,
    length_buckets,
    plan_buckets,
    plan_packed,
    rows_multiple,
)
from crossattn.data.pairs import pair_examples, pair_features
from crossattn.data.prepared import Prepared, prepare_examples
from crossattn.data.tokenizers import Tokenizer

__all__ = [
    "EvalBatch",
    "EvalBatches",
    "TrainIterator",
    "eval_batches",
    "feature_batches",
    "feature_eval_batches",
    "make_train_iterator",
    "train_batches",
]


_EPOCH, _EPOCH_KNOWN = 2**15, 2**18
"""The most examples of an epoch that is planned as a whole, in buckets; if their lengths are known."""


def make_train_iterator(
    source: Sequence[dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    target_tokenizer: Tokenizer | None = None,
    source_len: int = 128,
    target_len: int = 128,
    truncation: str = "drop",
    side: str = "both",
    link_share: float = 0.0,
    **batching: Any,
) -> "TrainIterator":
    """Returns batches of text pairs for training, repeated over shuffled epochs for ever.

    "pack" gives [rows, length] always, several examples a row; "bucket" gives one of a few shapes,
    one example a row, with about rows x length tokens each; "pad" gives [rows, length] always, one example
    a row. Row counts are of the global batch: each process gets its block of rows / process_count. The
    examples of a batch and their places depend neither on the number of processes nor on `batch_multiple`:
    empty rows at the end fill a bucket up to a multiple of them. So a state goes on with any number of
    processes.

    Args:
        source: random-access examples, see `sources`.
        tokenizer: of both sides, or of the source when `target_tokenizer` is given.
        mode: "pack", "bucket" or "pad".
        batch_size: rows of the global batch (in "bucket" mode those of the longest bucket).
        source_len, target_len: tokens; the longest that a source and a target may be, EOS included.
        truncation: "drop" or "cut" longer texts; the counts are attributes of the iterator.
        side: "both"; or "source" or "target" for a language model of that text (batches with
            target_* only).
        link_share: above 0, batches carry the gold links (see `features.Links`) of this share of the
            examples that have any.
        seed: of the order, and of the choice of those examples.
        process_index, process_count: this process among those that train together.
        batch_multiple: every row count of the global batch is a multiple of this, such as the mesh's
            data axes.
        window: examples planned together; more fill rows better and take longer at once. In "bucket" mode all
            of an epoch, if it has at most 262,144 texts, or 32,768 examples whose features have to be read;
            then the shapes of the batches do not depend on the seed.
        prefetch: batches made ahead by a thread; 0 for none.

    Raises:
        DataError: an option is out of range, no example fits, or no example has links.
    """
    features = pair_features(
        tokenizer,
        target_tokenizer,
        source_len=source_len,
        target_len=target_len,
        side=side,
        links=link_share > 0,
    )
    examples = pair_examples(source, side, link_share > 0)
    prepared = prepare_examples(examples, features, truncation)
    if link_share:
        prepared = prepared.with_links(link_share, batching.get("seed", 0))
    return train_batches(prepared, **batching)


def feature_batches(
    examples: Sequence[dict[str, Any]],
    features: Mapping[str, Feature],
    *,
    truncation: str = "drop",
    cache_mib: int = 0,
    **batching: Any,
) -> "TrainIterator":
    """Returns batches of features for training, repeated over shuffled epochs for ever.

    Examples are read and prepared one by one when a batch is made. Their lengths stay in memory.
    Values of a fixed size are stacked, one example a row; a batch that has such arrays also has "valid",
    int32 [rows], 1 where a row holds an example.

    Args:
        examples: random-access examples, see `sources`.
        features: by the names of the examples' values, which the arrays take.
        truncation: "drop" or "cut" values longer than a feature lets them be.
        cache_mib: MiB of prepared examples to keep. Kept examples are not read again, so take 0 if the source
            changes them.
        batching: as `make_train_iterator` has it: mode, batch_size, seed, process_index, process_count,
            batch_multiple, window, prefetch. "pack" wants features that all have a length; in "bucket" mode
            stacked values give every bucket the same number of rows.

    Raises:
        DataError: an option is out of range, or a feature cannot be packed; and when a batch is made, an
            example is wrong, or none is short enough.
    """
    return train_batches(FeatureExamples(examples, features, truncation, cache_mib), **batching)


def train_batches(
    encoded: Prepared | FeatureExamples,
    *,
    mode: str = "pack",
    batch_size: int = 16,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    batch_multiple: int = 1,
    window: int = 8192,
    prefetch: int = 2,
) -> "TrainIterator":
    """Returns batches of prepared examples, or of examples and their features, as `make_train_iterator` does.

    Raises:
        DataError: an option is out of range, or an example has values that cannot be packed.
    """
    if mode not in ("pack", "bucket", "pad"):
        raise DataError(f"mode is {mode!r}; expected 'pack', 'bucket' or 'pad'")
    rows_multiple(batch_size, process_count, batch_multiple)
    if not 0 <= process_index < process_count:
        raise DataError(f"process_index is {process_index} of {process_count} processes")
    if window < 1:
        raise DataError(f"window is {window}; expected at least 1 example")
    widths = encoded.widths
    if mode == "pack" and encoded.stacked:
        raise DataError(
            f"{', '.join(encoded.stacked)} cannot be packed, being of a fixed size; take mode 'bucket' or"
            " 'pad'"
        )
    if mode == "pack":
        plan = functools.partial(plan_packed, rows=batch_size, widths=widths)
    elif mode == "bucket":
        buckets = length_buckets(batch_size, widths, same_rows=bool(encoded.stacked))
        plan = functools.partial(plan_buckets, buckets=buckets)
    else:
        plan = functools.partial(plan_buckets, buckets=[Bucket(batch_size, widths)])

    def planned(index: int, examples: np.ndarray) -> list[Layout]:
        rng = np.random.default_rng([seed % 2**32, index])
        examples = encoded.fitting(examples)
        # Runs of other seeds that are trained as one program have the same shapes at the same time.
        order: Any = dict(order=np.random.default_rng(index)) if mode == "bucket" else {}
        return plan(examples, encoded.lengths_of(examples), rng=rng, **order)

    if mode == "pad":  # batches are windows themselves, or the last one of each would not be full
        window = batch_size
    elif mode == "bucket" and len(encoded) <= (
        _EPOCH_KNOWN if isinstance(encoded, Prepared) else _EPOCH
    ):
        window = len(encoded)  # an epoch has as many batches of each bucket by any seed
    window = min(window, len(encoded))
    shuffled, order_seed = shuffled_for_ever(len(encoded), seed)
    identity = f"{mode} {batch_size} {widths} {order_seed} {window} {encoded.fingerprint()}"
    windows = in_order(shuffled.batch(window).map_with_index(planned))
    layouts = grain.experimental.FlatMapIterDataset(windows, _Flatten())
    shard = (process_index, process_count, batch_multiple)
    batches = layouts.map(lambda layout: encoded.fill(layout.shard(*shard)))
    return TrainIterator(batches, encoded, identity, prefetch)


def shuffled_for_ever(count: int, seed: int) -> tuple[grain.MapDataset, int]:
    """Returns the numbers below ``count``, shuffled anew each epoch, and the seed of grain for this order."""
    # grain adds the number of the epoch to the seed: runs of other seeds share no order.
    order_seed = seed * 1_000_003 % 2**32
    # grain's endless repetition overflows in batches of one.
    endless = 2**62 // count
    return grain.MapDataset.range(count).shuffle(seed=order_seed).repeat(endless), order_seed


def in_order(dataset: grain.MapDataset) -> grain.IterDataset:
    """Returns an iterable without read-ahead: `TrainIterator` reads ahead and keeps each batch's state."""
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


class TrainIterator:
    """Iterator of batch dicts whose state resumes it bit for bit.

    Attributes:
        examples: how many are trained on.
        dropped: how many were left out for their length, of examples prepared ahead.
    """

    def __init__(
        self,
        dataset: grain.IterDataset,
        encoded: Prepared | FeatureExamples,
        identity: str,
        prefetch: int,
    ):
        if prefetch:
            dataset = grain.experimental.ThreadPrefetchIterDataset(
                dataset, prefetch_buffer_size=prefetch
            )
        self._iterator = iter(dataset)
        # Stops the prefetching thread before the interpreter takes its modules away.
        self._finalizer = weakref.finalize(self, self._iterator.close)
        self._fingerprint = zlib.crc32(identity.encode())
        self.examples, self._encoded = len(encoded), encoded
        self.dropped = getattr(encoded, "dropped", 0)

    @property
    def cut(self) -> Mapping[str, int]:
        """How many values were shortened so far, by the names of their features."""
        return self._encoded.cut

    def __iter__(self) -> "TrainIterator":
        return self

    def __next__(self) -> Batch:
        with _in_our_words():
            return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns a JSON-able state, from which the batch after the last one handed out comes next."""
        return {"stream": self._iterator.get_state(), "fingerprint": self._fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state of an iterator over the same data, tokenizer and options.

        Raises:
            DataError: the state belongs to other data or options.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise DataError(
                "the saved state of the data iterator belongs to other data, another tokenizer or "
                "other batch options; resume with those it was saved with, or start a new run"
            )
        with _in_our_words():
            self._iterator.set_state(state["stream"])

    def close(self) -> None:
        """Stops the prefetching thread; no batch comes afterwards."""
        self._finalizer()


@contextlib.contextmanager
def _in_our_words() -> Iterator[None]:
    """Removes the lines that grain adds to the message of an error."""
    try:
        yield
    except (DataError, DataUnavailable) as error:
        raise type(error)(str(error).partition("\n")[0]) from None


class _Flatten(grain.experimental.FlatMapTransform):
    def flat_map(self, element: list[Layout]) -> list[Layout]:
        return element
