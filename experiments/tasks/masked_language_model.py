"""Tokens that were taken out of a text, from all that is left: a model that reads both ways.

Rows are packed with texts that follow one another, and a model reads a row as one
text; a published BERT reads each alone, as it was trained to. With a tokenizer of 261 ids, every token is a
byte, and bits a token are bits a byte.

Source: Devlin et al. 2019, section 3.1; on bytes, Jaegle et al. 2021, "Perceiver IO", section 4.1.
"""

import math
from collections.abc import Mapping
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
    """Texts, and how much of them is masked.

    Attributes:
      density: share of the tokens that is taken out.
    """

    density: sections.Share


class MaskedLanguageModelTask(TextTask):
    """The tokens behind the masks, by a ``PerceiverIO`` or a ``Bert``, whose ``hidden`` reads both ways."""

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
        """Beside what every task on text holds: its model is of masked tokens.

        Raises:
          SettingsError: it is not.
        """
        super().check_pretrained(checkpoint)
        if not getattr(checkpoint.model.config, "masked_lm", False):
            raise SettingsError(
                f"{checkpoint.source} holds a {checkpoint.model.settings['model_type']} without a head for"
                " masked tokens; expected a BertForMaskedLM or a BertForPreTraining."
            )

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

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        scores = super().scores(sums)
        return scores | {"bits_per_token": scores["nll"] / math.log(2)}
