"""Bits a byte of n-gram models, the baseline of a language model of bytes.

    python -m experiments.bench.byte_models --config=configs/masked_bytes.py --order=5

N-grams are counted on the texts of the training split, smoothed by Witten and Bell's method, and measured on
another split, the end of each text included. An n-gram reads the bytes before a byte, without any masked.
"""

import math
from typing import Any

import numpy as np

from crossattn.data.tokenizers import EOS
from experiments.bench.classifiers import read_config
from experiments.options import Options
from experiments.tasks import make_task
from experiments.tasks.ngrams import surprises


def main() -> None:
    """Counts, measures and prints."""
    parser = Options(__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="a config, FILE[:ARGUMENT]")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    parser.add_argument("--order", type=int, default=5, metavar="N", choices=range(1, 7), help="5")
    options = parser.parse_args()
    task = make_task(read_config(options.config))
    train, other = (_texts(task, split) for split in ("train", options.split))
    nats = surprises(train, other, options.order, task.corpus.tokenizer.vocab_size)
    for order, nat in enumerate(nats, 1):
        print(f"{order}-gram   {nat.mean() / math.log(2):.3f} bits a token, of {len(nat)}")


def _texts(task: Any, split: str) -> list[np.ndarray]:
    side, tokenizer = task.config.data.side, task.corpus.tokenizer
    texts = [example[side] for example in task.corpus.split(split)]
    return [np.array([*ids, EOS], np.int64) for ids in tokenizer.encode_batch(texts)]


if __name__ == "__main__":
    main()
