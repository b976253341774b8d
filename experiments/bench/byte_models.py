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
from experiments.tasks.ngrams import surprises


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


def _texts(task, split: str) -> list:
    side = task.config.data.side
    texts = [example[side] for example in task.corpus.split(split)]
    return [[*ids, EOS] for ids in task.corpus.tokenizer.encode_batch(texts)]


if __name__ == "__main__":
    main()
