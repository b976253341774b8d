"""Masked language modelling: a model that reads both ways predicts the masked tokens of a text.

A model reads a row of packed texts as one text; a published BERT reads each alone, as in its training. With
a tokenizer of 261 ids, every token is a byte, and bits per token are bits per byte.

Source: Devlin et al. 2019, section 3.1; on bytes, Jaegle et al. 2021, "Perceiver IO", section 4.1.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.rows import of_all_rows, own_rows
from crossattn.train.losses import cross_entropy
from experiments.errors import SettingsError
from experiments.pretrained import Checkpoint
from experiments.tasks import protocols, sections
from experiments.tasks.base import Sums
from experiments.tasks.texts import TextTask


@dataclass(frozen=True, kw_only=True)
class MaskedData(sections.OneSidedData):
    """Texts, and how many of their tokens are masked.

    Attributes:
      density: share of the tokens that is masked.
    """

    density: sections.Share


class MaskedLanguageModelTask(TextTask):
    """A ``PerceiverIO`` or a ``Bert``, whose ``hidden`` reads both ways, and texts."""

    sections = {
        "data": MaskedData,
        "tokenizer": sections.Tokenizer,
        "loss": sections.CrossEntropy,
    }
    metrics = (*TextTask.metrics, "bits_per_token")
    asks = protocols.MaskedLanguageModel
    has_source = False
    takes_pretrained = True

    def check_pretrained(self, checkpoint: Checkpoint) -> None:
        """Raises SettingsError also where the model has no head for masked tokens."""
        super().check_pretrained(checkpoint)
        if not getattr(checkpoint.model.config, "masked_lm", False):
            raise SettingsError(
                f"{checkpoint.source} holds a {checkpoint.model.settings['model_type']} without a head for"
                " masked tokens; expected a BertForMaskedLM or a BertForPreTraining."
            )

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        model, tokens, segment_ids = (
            self.bind(params), batch["target_out"], batch["target_segment_ids"],
        )  # fmt: skip
        # Without a key, a batch has the same masks in every call.
        own = jax.random.key(0) if key is None else jax.random.fold_in(key, 0)
        own = jax.random.fold_in(own, of_all_rows(tokens.astype(jnp.uint32).sum()))
        density, shape = self.config.data.density, tokens.shape[1:]
        taken = own_rows(lambda n: jax.random.bernoulli(own, density, (n, *shape)), len(tokens))
        taken &= segment_ids > 0
        read: dict[str, Any] = dict(segment_ids=(segment_ids > 0).astype(jnp.int32))
        tokenizer = self.corpus.tokenizer
        if self.checkpoint is not None:
            frame = jnp.asarray((*tokenizer.frame.before, *tokenizer.frame.after))
            taken &= ~jnp.isin(tokens, frame)
            read = dict(segment_ids=segment_ids, positions=batch["target_positions"])
        hidden = model.hidden(jnp.where(taken, tokenizer.mask_id, tokens), **read, key=key)
        options = self.config.loss
        loss, sums = cross_entropy(
            model.logits(hidden), tokens, taken, options.label_smoothing, options.z_loss
        )
        return loss, sums | {"tokens": sums["weight"]}
