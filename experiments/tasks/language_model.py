"""Next-token prediction: the decoder-only model on one side of a corpus."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from crossattn import decode, functional
from crossattn.data.pipeline import eval_batches
from crossattn.models import Decoder
from crossattn.train.evaluate import loss_scores
from crossattn.train.linear_loss import linear_cross_entropy
from crossattn.train.sharding import everywhere, mesh_of, row_shares, rows_on
from crossattn.train.storage import Folder
from experiments.settings import decoder_config
from experiments.tasks.corpus import Corpus
from experiments.tasks.translation import summed


class LanguageModelTask:
    """The ``Task`` of the training loop for a ``Decoder``."""

    def __init__(self, config: Any, assets: Folder | None = None):
        self.config = config
        self.corpus = Corpus(config, assets, side=config.data.side)
        self._eval_sums = jax.jit(lambda params, batch: self.loss(params, batch, None)[1])

    @cached_property
    def model_config(self):
        """The model's shape; needs the tokenizer for its vocabulary."""
        data = self.config.data
        return decoder_config(self.config.model, self.corpus.tokenizer.vocab_size, data.target_len)

    @cached_property
    def _build(self):
        return lambda rngs: Decoder(self.model_config, rngs=rngs)

    def bind(self, params: Any) -> Decoder:
        """The module holding ``params``."""
        return functional.bind(self._build, params)

    def init(self, key: jax.Array) -> Any:
        return functional.init(self._build, key)

    def logical_axes(self) -> Any:
        return functional.logical_axes(self._build)

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, dict]:
        """Cross-entropy of the next token; no key means no dropout."""
        model, options = self.bind(params), self.config.loss
        hidden = model.hidden(
            batch["target_in"],
            segments=batch["target_segments"],
            positions=batch["target_positions"],
            key=key,
        )
        return linear_cross_entropy(
            hidden,
            model.output_table(),
            batch["target_out"],
            batch["target_segments"] > 0,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            chunks=options.chunks,
        )

    def train_iterator(self, shard_index: int, shard_count: int):
        return self.corpus.train_iterator(shard_index, shard_count)

    def save_assets(self, directory: Path) -> None:
        self.corpus.save(directory)

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Loss, perplexity and accuracy on the validation split."""
        return self.split_loss(params, "validation")

    def split_loss(self, params: Any, split: str) -> dict[str, float]:
        """Loss, perplexity and token accuracy without dropout, where the parameters lie."""
        data, mesh = self.config.data, mesh_of(params)
        batches = eval_batches(
            self.corpus.split(split),
            self.corpus.tokenizer,
            rows=rows_on(mesh, data.rows),
            target_len=data.target_len,
            side=data.side,
            rows_multiple=row_shares(mesh),
        )
        return loss_scores(summed(self._eval_sums, params, batches))

    def sample(self, params: Any, max_new_tokens: int) -> Sequence[str]:
        """The model's most likely text."""
        search = jax.jit(
            lambda p: decode.generate(self.bind(p), batch=1, max_new_tokens=max_new_tokens).tokens[
                :, 0
            ],
            out_shardings=everywhere(mesh_of(params)),
        )
        tokens = np.asarray(search(params))
        return self.corpus.tokenizer.decode_batch(tokens.tolist())
