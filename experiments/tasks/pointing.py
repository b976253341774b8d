"""Cloze questions for a model that reads the whole question and points at the passage from its blank.

The model reads neither the answer nor the end that follow the question in the target. The candidates are the
names of terms in the passage; the loss counts the first blank of each question.

Source: Kadlec et al. 2016, "Text Understanding with the Attention Sum Reader Network", section 4.
"""

from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossattn.data.sources.cloze import BLANK, NAMES
from experiments.tasks import protocols
from experiments.tasks.cloze import ClozeTask, answer_places
from experiments.tasks.corpus import UnreadCorpus


class PointingTask(ClozeTask):
    """A reader that points, and examples as of ``ClozeTask``."""

    asks = protocols.PointingModel
    asked = (BLANK,)

    def told(self, batch: Any) -> Any:
        """Returns the mask [B T] of the first blank of each question."""
        (blank,) = self._ids(BLANK)
        blanks = (self._question(batch) > 0) & (batch["target_out"] == blank)
        first = jnp.argmax(_same(batch) & blanks[:, None, :], axis=-1)
        return blanks & (first == jnp.arange(blanks.shape[-1]))

    def labels(self, batch: Any) -> Any:
        """Returns the answer of the text of each place, [B T]."""
        own = answer_places(batch["target_segment_ids"])
        place = jnp.argmax(_same(batch) & own[:, None, :], axis=-1)
        return jnp.take_along_axis(batch["target_out"], place, axis=-1)

    def read_source(self, model: Any, batch: Any, key: Any, return_weights: bool = False):
        """Returns log p [B T V] of what stands at each place of the questions, and the weights or None."""
        batch, question = self.seen(batch), self._question(batch)
        return model.hidden(
            batch["source"],
            jnp.where(question > 0, batch["target_out"], 0),
            candidates=jnp.isin(batch["source"], self._names),
            source_segment_ids=batch["source_segment_ids"],
            target_segment_ids=question,
            key=key,
            return_weights=return_weights,
        )

    def _question(self, batch: Any) -> Any:
        """Returns segments [B T] of ``target_out``, 0 from each answer on."""
        ids = batch["target_segment_ids"]
        own = answer_places(ids)
        return jnp.where(own | jnp.pad(own[:, :-1], ((0, 0), (1, 0))), 0, ids)

    @cached_property
    def _names(self) -> np.ndarray:
        return np.array([token for name in NAMES for token in self._ids(name)])

    def _ids(self, word: str) -> list[int]:
        """Returns the tokens of a word inside a text; any one for a plan, which reads no texts."""
        if isinstance(self.corpus, UnreadCorpus):
            return [0]
        encode = self.corpus.tokenizer.encode
        return encode(f"a {word}")[len(encode("a")) :]


def _same(batch: Any) -> Any:
    """Returns which places [B T T] of packed rows are of one text."""
    ids = batch["target_segment_ids"]
    return ids[:, :, None] == ids[:, None, :]
