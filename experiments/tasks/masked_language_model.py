"""Tokens that were taken out of a text, from all that is left: a model that reads both ways.

The one thing to know: rows are packed with texts that follow one another, and a model reads a row as one
text. With a tokenizer of 261 ids, every token is a byte, and bits a token are bits a byte.

Source: Devlin et al. 2019, section 3.1; on bytes, Jaegle et al. 2021, "Perceiver IO", section 4.1.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.data.tokenizers import UNK
from crossattn.train.losses import cross_entropy
from experiments import keys
from experiments.keys import Key
from experiments.tasks.base import Sums
from experiments.tasks.texts import TextTask

MASK = UNK
"""What stands for a token that was taken out; no tokenizer gives it for any text."""

KEYS = (
    keys.TEXT
    | keys.BATCHES
    | keys.SIDE
    | {"data.density": Key(float, "Share of the tokens that is taken out.", "(0, 1)")}
)


class MaskedLanguageModelTask(TextTask):
    """The tokens behind the masks, by a ``PerceiverIO`` or another model whose ``hidden`` reads both ways."""

    metrics = (*TextTask.metrics, "bits_per_token")
    reads = ("tokens", "segment_ids")
    has_source = False

    def sizes(self) -> dict[str, Any]:
        return dict(
            vocab_size=self.corpus.tokenizer.vocab_size, max_length=self.config.data.target_len
        )

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        model, tokens, segment_ids = (
            self.bind(params), batch["target_out"], batch["target_segment_ids"],
        )  # fmt: skip
        # Without a key, the same tokens of the same batch each time.
        own = jax.random.key(0) if key is None else jax.random.fold_in(key, 0)
        own = jax.random.fold_in(own, tokens.astype(jnp.uint32).sum())
        taken = jax.random.bernoulli(own, self.config.data.density, tokens.shape)
        taken &= segment_ids > 0
        hidden = model.hidden(
            jnp.where(taken, MASK, tokens), segment_ids=(segment_ids > 0).astype(jnp.int32), key=key
        )
        options = self.config.loss
        loss, sums = cross_entropy(
            model.logits(hidden), tokens, taken, options.label_smoothing, options.z_loss
        )
        return loss, sums | {"tokens": sums["weight"]}

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        scores = super().scores(sums)
        return scores | {"bits_per_token": scores["nll"] / math.log(2)}
