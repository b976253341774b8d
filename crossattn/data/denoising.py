"""Batches for learning from text alone: a stream of tokens cut into chunks, each made a source and a target.

The number of a row of the global batch decides its content: the chunks come from an order that a seed fixes,
the noise from a generator made of seed and number. So batches do not depend on the number of processes, and a
place in the stream resumes them exactly, with fresh noise in every epoch.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int, Integer

from crossattn.data.corruption import Objective, Pair
from crossattn.data.errors import DataError
from crossattn.data.evaluation import EvalBatch
from crossattn.data.features.text import lay_text
from crossattn.data.packing import Batch, Layout, rows_multiple
from crossattn.data.pipeline import TrainIterator, in_order, shuffled_for_ever
from crossattn.data.prepared import Prepared
from crossattn.data.tokenizers import BOS

_BLOCK = 4096  # texts whose lengths are added up at a time


class Chunks(Sequence):
    """The concatenated texts, each begun by BOS, in the fewest chunks of equal length.

    Lengths differ by one at most, and every token is in one chunk. T5 puts nothing between texts; BOS, which
    no target ends with, tells where one begins.

    Args:
        lengths: tokens of each text, its BOS included.
        read: returns the text of a number, BOS, ids, EOS.
        longest: the most tokens of a chunk.
    """

    def __init__(
        self,
        lengths: Integer[np.ndarray, " texts"],
        read: Callable[[int], Int[np.ndarray, " tokens"]],
        longest: int,
    ):
        self._lengths, self._read = lengths, read
        sizes = [self._sizes(first).sum() for first in range(0, len(lengths), _BLOCK)]
        self._before = np.concatenate([[0], np.cumsum(sizes)])
        self.tokens = int(self._before[-1])
        self._count = -(-self.tokens // longest)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Int[np.ndarray, " tokens"]:
        if not 0 <= index < len(self):
            raise IndexError(f"chunk {index} of {len(self)}")
        start, stop = (i * self.tokens // len(self) for i in (index, index + 1))
        block = int(np.searchsorted(self._before, start, "right")) - 1
        parts, place = [], int(self._before[block])
        for first in range(block * _BLOCK, len(self._lengths), _BLOCK):
            ends = place + np.cumsum(self._sizes(first))
            # The first text that ends after the start, to the one that reaches the stop.
            for row in range(int(np.searchsorted(ends, start, "right")), len(ends)):
                begins = int(ends[row - 1]) if row else place
                if begins >= stop:
                    return np.concatenate(parts)
                text = self._read(first + row)[:-1]
                parts.append(text[max(start - begins, 0) : stop - begins])
            place = int(ends[-1])
        return np.concatenate(parts)

    def _sizes(self, first: int) -> Int[np.ndarray, " texts"]:
        """Returns the number of tokens of each text of a block."""
        return np.asarray(self._lengths[first : first + _BLOCK], np.int64)


def make_denoising_iterator(
    texts: Prepared,
    objective: Objective,
    *,
    batch_size: int,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    prefetch: int = 2,
) -> TrainIterator:
    """Returns batches [rows, length] without end, as `pipeline.make_train_iterator` packs them.

    Args:
        texts: whole texts as targets, of a `side` alone.
        objective: makes source and target of a chunk.
        batch_size: of the global batch; each process gets its block of rows / process_count.
        seed: of the order and the noise.
        process_index, process_count: this process among those that train together.
        prefetch: batches made ahead by a thread; 0 for none.

    Raises:
        DataError: batch_size does not divide over the processes, or the texts have no tokens.
    """
    rows_multiple(batch_size, process_count)
    chunks = _chunks(texts, objective)
    share = batch_size // process_count

    def batch(number: int, order: np.ndarray) -> Batch:
        first = process_index * share
        mine = order.reshape(batch_size, -1)[first : first + share].tolist()
        start = number * batch_size + first
        made = [_row(chunks, objective, seed, start + i, ids) for i, ids in enumerate(mine)]
        return _filled(made, share, objective)

    shuffled, order_seed = shuffled_for_ever(len(chunks), seed)
    batches = shuffled.batch(batch_size * objective.texts_a_row).map_with_index(batch)
    identity = f"{objective} {batch_size} {order_seed} {texts.fingerprint()}"
    return TrainIterator(in_order(batches), texts, identity, prefetch)


def denoising_eval_batches(
    texts: Prepared, objective: Objective, *, batch_size: int
) -> Iterator[EvalBatch]:
    """Yields every chunk once, in order, under the same noise in every evaluation of every run.

    Indices are those of a row's first chunk.
    """
    chunks, width = _chunks(texts, objective), objective.texts_a_row
    for first in range(0, len(chunks), batch_size * width):
        starts = range(first, min(first + batch_size * width, len(chunks)), width)
        ids = [range(start, min(start + width, len(chunks))) for start in starts]
        made = [
            _row(chunks, objective, 0, start, mine) for start, mine in zip(starts, ids, strict=True)
        ]
        indices = np.full(batch_size, -1, np.int64)
        indices[: len(made)] = starts
        yield EvalBatch(indices, _filled(made, batch_size, objective))


def _chunks(texts: Prepared, objective: Objective) -> Chunks:
    def read(row: int) -> np.ndarray:
        return texts.values(np.array([row]))["target"][0].astype(np.int32)

    chunks = Chunks(texts.lengths["target"], read, objective.text_len)
    if chunks.tokens < 2:
        raise DataError("the texts have no tokens")
    return chunks


def _row(
    chunks: Chunks, objective: Objective, seed: int, number: int, ids: Iterable[int]
) -> list[Pair]:
    """Returns sources and targets of row `number`, made of those chunks."""
    rng = np.random.default_rng([seed % 2**32, number])
    return objective.pairs([chunks[i] for i in ids], rng)


def _filled(made: Sequence[list[Pair]], batch_size: int, objective: Objective) -> Batch:
    """Returns the batch of so many rows."""
    pairs = [pair for row in made for pair in row]
    sizes = [np.array([[len(source), len(target)] for source, target in row]) for row in made]
    starts = np.concatenate([np.cumsum(each, 0) - each for each in sizes])
    layout = Layout(
        batch_size,
        {"source": objective.source_len, "target": objective.target_len},
        examples=np.arange(len(pairs)),
        row=np.repeat(np.arange(len(made)), [len(row) for row in made]),
        starts={"source": starts[:, 0], "target": starts[:, 1]},
        segment=np.concatenate([np.arange(1, len(row) + 1) for row in made]),
    )
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    targets = [np.append(BOS, target) for target in targets]
    return lay_text(layout, "source", sources) | lay_text(layout, "target", targets, predicted=True)
