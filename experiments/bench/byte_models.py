"""Bits a byte of counted n-grams, which a language model of bytes must beat.

    python -m experiments.bench.byte_models --config=configs/masked_bytes.py --order=5

Counts of the training split's texts, smoothed by Witten and Bell's method down to equal chances, on the bytes
of another split and the end of each text. An n-gram reads what stands before a byte, all of it; a model that
fills in masks reads both sides, with holes in them.
"""

import math

import numpy as np

from crossattn.data.tokenizers import EOS
from experiments.bench.classifiers import read_config
from experiments.options import Options
from experiments.tasks import make_task

_BITS = 10  # of an id; six of them fit into an int64


def main() -> None:
    """Count, measure and print."""
    parser = Options(__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="a config, FILE[:ARGUMENT]")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    parser.add_argument("--order", type=int, default=5, metavar="N", choices=range(1, 7), help="5")
    options = parser.parse_args()
    task = make_task(read_config(options.config))
    train, other = (
        [np.asarray(text, np.int64) for text in _texts(task, split)]
        for split in ("train", options.split)
    )
    nats = surprises(train, other, options.order, task.corpus.tokenizer.vocab_size)
    for order, nat in enumerate(nats, 1):
        print(f"{order}-gram   {nat.mean() / math.log(2):.3f} bits a token, of {len(nat)}")


def surprises(train: list, other: list, order: int, vocab_size: int) -> list[np.ndarray]:
    """-log p of each token of the other texts under n-grams of 1, 2, ... ``order`` tokens.

    p(w | h) = (c(h w) + t(h) p(w | h')) / (c(h) + t(h)), where t(h) counts the kinds of tokens after h, and
    h' is h without its first token.

    Source: Witten and Bell 1991, method C; Chen and Goodman 1998, section 2.6.
    """
    p, found = np.full(sum(map(len, other)), 1 / vocab_size), []
    for n in range(1, order + 1):
        grams, counts = np.unique(_grams(train, n), return_counts=True)
        contexts, starts = np.unique(grams >> _BITS, return_index=True)
        totals = np.add.reduceat(counts, starts)
        kinds = np.diff(np.append(starts, len(grams)))
        here = _grams(other, n)
        count = _looked_up(grams, counts, here)
        total = _looked_up(contexts, totals, here >> _BITS)
        kind = _looked_up(contexts, kinds, here >> _BITS)
        p = np.where(total > 0, (count + kind * p) / np.maximum(total + kind, 1), p)
        found.append(-np.log(p))
    return found


def _grams(texts: list, n: int) -> np.ndarray:
    """Each token with the n - 1 before it as one number; before a text stand ids of 0."""
    found = []
    for text in texts:
        padded = np.concatenate([np.zeros(n - 1, np.int64), text])
        parts = [padded[i : i + len(text)] << (_BITS * (n - 1 - i)) for i in range(n)]
        found.append(sum(parts))
    return np.concatenate(found)


def _looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The values of the wanted keys, 0 for those that are not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def _texts(task, split: str) -> list:
    side = task.config.data.side
    texts = [example[side] for example in task.corpus.split(split)]
    return [[*ids, EOS] for ids in task.corpus.tokenizer.encode_batch(texts)]


if __name__ == "__main__":
    main()
