"""Masked language modelling: a model that reads both ways predicts the masked tokens of a text.

A model reads a row of packed texts as one text; a published BERT reads each alone, as in its training. With
a tokenizer of 261 ids, every token is a byte, and bits per token are bits per byte.

Source: Devlin et al. 2019, section 3.1; on bytes, Jaegle et al. 2021, "Perceiver IO", section 4.1.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.rows import of_each_row
from crossattn.types import NonNegative
from experiments.errors import SettingsError
from experiments.pretrained import Checkpoint
from experiments.tasks import ngrams, protocols, sections
from experiments.tasks.base import Sums
from experiments.tasks.texts import TextTask, sums_of_rows, token_loss


@dataclass(frozen=True, kw_only=True)
class MaskedData(sections.OneSidedData):
    """Texts, and how many of their tokens are masked.

    Attributes:
      density: share of the tokens that is masked.
    """

    density: sections.Share


@dataclass(frozen=True)
class MaskedCrossEntropy(sections.CrossEntropy):
    """The loss of masked tokens.

    Attributes:
      seen_weight: weight in training of each token that is not masked, against 1 of a masked one.
    """

    seen_weight: NonNegative = 0.0


class MaskedLanguageModelTask(TextTask):
    """A ``PerceiverIO`` or a ``Bert``, whose ``hidden`` reads both ways, and texts."""

    sections = {
        "data": MaskedData,
        "tokenizer": sections.Tokenizer,
        "loss": MaskedCrossEntropy,
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
        model, masked = self.bind(params), self.masked(batch, key)
        hidden = self._hidden(model, batch, masked, key)
        options, weights, table = self.config.loss, masked.astype(jnp.float32), None
        if key is not None:  # only training learns what it sees
            seen_weight = options.get("seen_weight", 0.0)
            weights = jnp.where(masked, 1.0, seen_weight) * (batch["target_segment_ids"] > 0)
        if hasattr(model, "output_product"):
            hidden, table = model.output_product(hidden)
        return token_loss(model, hidden, batch["target_out"], weights, options, table)

    def _hidden(self, model: Any, batch: Any, masked: Any, key: jax.Array | None) -> jax.Array:
        """Returns the model's last vectors, which read the tokens that are not masked."""
        segment_ids = batch["target_segment_ids"]
        read: dict[str, Any] = dict(segment_ids=(segment_ids > 0).astype(jnp.int32))
        if self.checkpoint is not None:
            read = dict(segment_ids=segment_ids, positions=batch["target_positions"])
        seen = jnp.where(masked, self.corpus.tokenizer.mask_id, batch["target_out"])
        return model.hidden(seen, **read, key=key)

    def outcomes(self, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns the loss of each text, times its masked tokens; a group is a file."""
        return self.losses_of_texts(self._losses, params, split)

    def _losses(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        model, masked = self.bind(params), self.masked(batch, None)
        hidden, chunks = self._hidden(model, batch, masked, None), self.config.loss.chunks
        return sums_of_rows(model.logits, hidden, batch["target_out"], masked, chunks)

    def masked(self, batch: Any, key: jax.Array | None) -> jax.Array:
        """Draws which tokens [B T] of each row are masked; without a key, the same ones in every call."""
        tokens, present = batch["target_out"], batch["target_segment_ids"] > 0
        own = jax.random.key(0) if key is None else jax.random.fold_in(key, 0)
        draw = functools.partial(
            jax.random.bernoulli, p=self.config.data.density, shape=tokens.shape[1:]
        )
        drawn = present & of_each_row(draw, own, jnp.where(present, tokens, 0))
        if self.checkpoint is None:
            return drawn
        frame = self.corpus.tokenizer.frame
        return drawn & ~jnp.isin(tokens, jnp.asarray((*frame.before, *frame.after)))

    def baselines(self, split: str) -> dict[str, float]:
        """Returns nats per masked token of n-grams of the tokens on its left, and on both sides."""
        kinds, mask = self.corpus.tokenizer.vocab_size, self.corpus.tokenizer.mask_id
        train = [text for text, _ in self._rows("train")]

        def nats(name: str, windows: Any) -> np.ndarray:
            rows = self._rows(name)
            texts, masks = [text for text, _ in rows], np.concatenate([own for _, own in rows])
            seen = [np.where(own, mask, text) for text, own in rows]
            found = ngrams.window_surprises(train, texts, windows, kinds, seen)
            return np.array([each[masks].mean() for each in found])

        scores = {}
        for name, windows in (("left", ngrams.LEFT), ("both_sides", ngrams.BOTH_SIDES)):
            windows = ngrams.countable(windows, kinds)
            best = nats("validation", windows).argmin()
            scores[f"ngrams_{name}_nll"] = float(nats(split, windows)[best])
        return scores

    def _rows(self, split: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the tokens of each row of a split, and which are masked."""
        found = []
        for batch in self.eval_batches(split, None):
            masked = np.asarray(self.masked(batch, None))
            for tokens, own, segments in zip(
                batch["target_out"], masked, batch["target_segment_ids"], strict=True
            ):
                there = segments > 0
                found.append((tokens[there].astype(np.int64), own[there]))
        return found
