"""Next-token prediction: a decoder-only model on one side of a corpus."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from crossattn import decode
from crossattn.train.sharding import everywhere, mesh_of
from experiments import keys
from experiments.keys import Key
from experiments.tasks.base import Sums
from experiments.tasks.texts import TextTask

KEYS = (
    keys.TEXT
    | keys.BATCHES
    | keys.SIDE
    | {
        "tokenizer.joint": Key(bool, "Learn the tokenizer from both sides.", needed=False),
        "evaluate.decoding.batch_size": Key(
            int, "Texts that a plan decodes together.", "[1, inf)", needed=False
        ),
    }
)


class LanguageModelTask(TextTask):
    """The next token of a ``Decoder``, or of another model with ``hidden(tokens)``."""

    reads = ("tokens", "segment_ids", "positions")
    has_source = False
    takes_pretrained = True

    def sizes(self) -> dict[str, Any]:
        return dict(
            vocab_size=self.corpus.tokenizer.vocab_size, max_length=self.config.data.target_len
        )

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        model = self.bind(params)
        hidden = model.hidden(
            batch["target_in"],
            segment_ids=batch["target_segment_ids"],
            positions=batch["target_positions"],
            key=key,
        )
        return self.cross_entropy(model, hidden, batch)

    def samples(self, params: Any, split: str) -> Sequence[str]:
        """The model's most likely text."""
        most = self.config.data.target_len
        search = jax.jit(
            lambda p: decode.generate(self.bind(p), batch=1, **self.search(most)).tokens[:, 0],
            out_shardings=everywhere(mesh_of(params)),
        )
        tokens = np.asarray(search(params))
        return self.corpus.tokenizer.decode_batch(tokens.tolist())
