"""Next-token prediction: a decoder-only model on one side of a corpus."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from crossattn import decode
from crossattn.decode.config import right_aligned
from crossattn.train.sharding import everywhere, mesh_of
from experiments.errors import SettingsError
from experiments.tasks import protocols, sections
from experiments.tasks.base import Sums
from experiments.tasks.texts import TextTask

_ROWS = 32  # texts that are gone on with at once


class LanguageModelTask(TextTask):
    """The next token of a ``Decoder``, or of another model with ``hidden(tokens)``."""

    sections = {
        "data": sections.OneSidedData,
        "tokenizer": sections.PairTokenizer,
        "loss": sections.CrossEntropy,
        "evaluate": sections.PlannedEvaluation,
    }
    asks = protocols.LanguageModel
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
        """The model's most likely text, where it can decode."""
        can = not protocols.lacking(type(self.bind(params)), protocols.Generator)
        return self.continued(params, [""]) if can else ()

    def continued(
        self, params: Any, texts: Sequence[str], max_new_tokens: int | None = None, **search: Any
    ) -> list[str]:
        """Texts, each with what the model writes after it.

        Args:
          params: of the model.
          texts: what it goes on with.
          max_new_tokens: the most tokens that it writes; None is up to ``data.target_len`` with the text's.
          search: as ``decode.generate`` has it.

        Raises:
          SettingsError: a text leaves no room for more.
        """
        tokenizer, most = self.corpus.tokenizer, self.config.data.target_len
        before = (tokenizer.frame.start, *tokenizer.frame.before)
        prompts = [[*before, *tokenizer.encode(text)] for text in texts]
        longest = max(prompts, key=len)
        if len(longest) > most:
            raise SettingsError(
                f"a text has {len(longest)} tokens with its beginning; expected at most {most}, "
                "config.data.target_len."
            )
        length = min(max_new_tokens or most, most + 1 - len(longest))
        generate = jax.jit(
            lambda p, prefix, lengths: decode.generate(
                self.bind(p), prefix=prefix, prefix_lengths=lengths, **self.search(length, **search)
            ).tokens[:, 0],
            out_shardings=everywhere(mesh_of(params)),
        )
        written: list[str] = []
        for first in range(0, len(prompts), _ROWS):
            rows = prompts[first : first + _ROWS]
            filled = rows + [rows[0]] * (min(_ROWS, len(prompts)) - len(rows))
            tokens = generate(params, *right_aligned(filled, len(longest)))
            own = zip(rows, np.asarray(tokens).tolist(), strict=False)
            written += tokenizer.decode_batch([prompt + new for prompt, new in own])
        return written
