"""Learning from text alone: an encoder-decoder that fills in what was taken out of it, or goes on after it.

Source: Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text
transformer".
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from crossattn import decode
from crossattn.data.denoising import denoising_eval_batches, make_denoising_iterator
from crossattn.data.evaluation import EvalBatch
from crossattn.train.evaluate import loss_scores
from crossattn.train.sharding import everywhere, mesh_of, rows_on, spread_batch
from crossattn.train.storage import Folder
from experiments.settings import objective, transformer_config
from experiments.tasks.corpus import Corpus
from experiments.tasks.translation import TranslationTask, summed

_MULTIPLE = 128  # of vocabularies: what accelerators compute at once, and meshes divide


class DenoisingTask(TranslationTask):
    """The ``Task`` of the training loop for a ``Transformer`` and one text.

    What the source and the target are is not a pair of texts, but made of one, see
    ``crossattn.data.corruption``.
    """

    def __init__(self, config: Any, assets: Folder | None = None):
        self.config = config
        self.corpus = Corpus(config, assets, side=config.data.side, whole=True)
        self._eval_sums = jax.jit(lambda params, batch: self.loss(params, batch, None)[1])

    @cached_property
    def objective(self):
        """What becomes of text; its sentinels come after the tokenizer's tokens."""
        return objective(self.config.data, self.corpus.tokenizer.vocab_size)

    @cached_property
    def model_config(self):
        """The model's shape; needs the tokenizer for its vocabulary."""
        data = self.config.data
        size = vocabulary(self.corpus.tokenizer.vocab_size, data.sentinels)
        longest = max(data.source_len, data.target_len)
        return transformer_config(self.config.model, size, None, longest)

    def train_iterator(self, shard_index: int, shard_count: int):
        return make_denoising_iterator(
            self.corpus.train_pairs(),
            self.objective,
            rows=self.config.data.rows,
            seed=self.config.seed,
            process_index=shard_index,
            process_count=shard_count,
        )

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Loss, perplexity, bits a token and accuracy on the validation split."""
        return self.split_loss(params, "validation")

    def split_loss(self, params: Any, split: str) -> dict[str, float]:
        """Those of a split without dropout, where the parameters lie."""
        batches = self._eval_batches(split, mesh_of(params))
        scores = loss_scores(summed(self._eval_sums, params, batches))
        return scores | {"bits_per_token": scores["nll"] / math.log(2)}

    def sample(self, params: Any, max_new_tokens: int, split: str = "validation") -> Sequence[str]:
        """Texts of a split with the parts that the model wrote, next to what was there, three lines each."""
        mesh = mesh_of(params)
        item = next(iter(self._eval_batches(split, mesh)))
        search = jax.jit(
            lambda p, source, segments: decode.generate(
                self.bind(p), source, segments, max_new_tokens=max_new_tokens
            ).tokens[:, 0],
            out_shardings=everywhere(mesh),
        )
        # Of a row that holds several texts, the first.
        alone = {name: x * (item.batch[f"{name.partition('_')[0]}_segments"] == 1)
                 for name, x in item.batch.items()}  # fmt: skip
        batch = spread_batch(alone, mesh)
        written = np.asarray(search(params, batch["source"], batch["source_segments"]))
        return [
            self._described(alone["source"][row], written[row], alone["target_out"][row])
            for row in np.flatnonzero(item.indices >= 0)
        ]

    def _described(self, source: np.ndarray, written: np.ndarray, wanted: np.ndarray) -> str:
        tokenizer, size = self.corpus.tokenizer, self.corpus.tokenizer.vocab_size
        read = source[source > 0]
        shown = "".join(
            " ___" if token >= size else tokenizer.tokens([token])[0].replace("▁", " ")
            for token in read[:-1].tolist()
        )
        texts = [self.objective.filled(read, target[target > 0]) for target in (written, wanted)]
        filled, was = tokenizer.decode_batch(text.tolist() for text in texts)
        return f"read:    {shown.strip()}\nwritten: {filled}\nwas:     {was}"

    def _eval_batches(self, split: str, mesh: Any) -> "Sequence[EvalBatch]":
        rows = rows_on(mesh, self.config.data.rows)
        return list(denoising_eval_batches(self.corpus.pairs(split), self.objective, rows=rows))


def vocabulary(tokens: int, sentinels: int) -> int:
    """Rows of the tables for so many tokens and sentinels, T5's 32,128 for 32,000 and 100."""
    return -(-(tokens + sentinels) // _MULTIPLE) * _MULTIPLE
