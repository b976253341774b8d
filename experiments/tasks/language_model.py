"""Next-token prediction: a decoder-only model on one side of a corpus."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from crossattn.decode.config import right_aligned
from experiments.errors import SettingsError
from experiments.tasks import protocols, sections
from experiments.tasks.base import Sums
from experiments.tasks.texts import TextTask, sums_of_rows

_ROWS = 32  # texts that are continued together


class LanguageModelTask(TextTask):
    """A ``Decoder``, or another model with ``hidden(tokens)``, and texts."""

    sections = {
        "data": sections.OneSidedData,
        "tokenizer": sections.PairTokenizer,
        "loss": sections.CrossEntropy,
        "evaluate": sections.PlannedEvaluation,
    }
    asks = protocols.LanguageModel
    has_source = False
    takes_pretrained = True

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        model = self.bind(params)
        return self.cross_entropy(model, self._hidden(model, batch, key), batch)

    def _hidden(self, model: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        return model.hidden(
            batch["target_in"],
            segment_ids=batch["target_segment_ids"],
            positions=batch["target_positions"],
            key=key,
        )

    def report(self, params: Any, split: str, **options: Any) -> dict[str, Any]:
        """Returns the losses of a split, and ``bits_per_byte``, which other tokenizers can be held to.

        Ends of texts count as tokens that have no byte.
        """
        results, bits, size = super().report(params, split, **options), 0.0, 0
        for item in self.numbered_batches(split, None):
            batch = item.batch
            bits += float(self.told(batch).sum()) * results["nll"] / math.log(2)
            for ids, segments in zip(batch["target_out"], batch["target_segment_ids"], strict=True):
                texts = [ids[segments == i].tolist() for i in range(1, segments.max() + 1)]
                size += sum(len(x.encode()) for x in self.corpus.tokenizer.decode_batch(texts))
        return results | {"bits_per_byte": bits / size}

    def outcomes(self, params: Any, split: str) -> dict[str, list[Any]]:
        """Returns the loss of each text without smoothing, times its tokens; a group is a file."""
        return self.losses_of_texts(self._losses, params, split)

    def _losses(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        model = self.bind(params)
        hidden, chunks = self._hidden(model, batch, None), self.config.loss.chunks
        return sums_of_rows(model.logits, hidden, self.labels(batch), self.told(batch), chunks)

    def samples(self, params: Any, split: str) -> Sequence[str]:
        """Returns the model's most likely text, where it can decode."""
        can = not protocols.lacking(type(self.bind(params)), protocols.Generator)
        return self.continued(params, [""]) if can else ()

    def continued(
        self, params: Any, texts: Sequence[str], max_new_tokens: int | None = None, **search: Any
    ) -> list[str]:
        """Returns texts, each with the model's continuation.

        Args:
          params: of the model.
          texts: beginnings.
          max_new_tokens: the most tokens that it writes; None is up to ``data.target_len`` with the text's.
          search: arguments of ``decode.generate``.

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
        generate = self.generator(params, **self.search(length, **search))
        written: list[str] = []
        for first in range(0, len(prompts), _ROWS):
            rows = prompts[first : first + _ROWS]
            filled = rows + [rows[0]] * (min(_ROWS, len(prompts)) - len(rows))
            prefix, lengths = right_aligned(filled, len(longest))
            tokens = generate(prefix=prefix, prefix_lengths=lengths)
            own = zip(rows, tokens.tolist(), strict=False)
            written += tokenizer.decode_batch([prompt + new for prompt, new in own])
        return written
