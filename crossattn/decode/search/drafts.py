"""Who guesses the next tokens for ``speculative`` to verify: a small model, or the prompt itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from crossattn.decode.config import GenerationConfig
from crossattn.decode.logits import topk
from crossattn.decode.logits.processors import LogitsProcessor
from crossattn.decode.search.greedy import most_likely
from crossattn.decode.states import DecodeStep, rewind
from crossattn.types import AnyArray, Array, Float, Int


class Known(NamedTuple):
    """What a draft is given: sequences of unlike length, and how their tokens will be chosen."""

    tokens: Int[Array, "B 1 X"]
    lengths: Int[Array, " B"]
    config: GenerationConfig
    processors: Sequence[LogitsProcessor]
    key: Any


@runtime_checkable
class Draft(Protocol):
    """Guesses ``lookahead`` tokens at a time."""

    lookahead: int

    def begin(self, config: GenerationConfig) -> Any:
        """What it carries from guess to guess."""
        ...

    def guess(
        self, known: Known, carried: Any
    ) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None, Any]:
        """Tokens, the distributions that they are from (None: they were sure), what it carries."""
        ...


@dataclass(frozen=True)
class ModelDraft:
    """A smaller model of the same vocabulary.

    Attributes:
      decode_step: its own.
      states: what its ``prefill`` made for one sequence a row and
        ``GenerationConfig.cache_length + lookahead`` positions; or a function that makes them of that number,
        ``lambda length: small.prefill(batch, 1, length, source=source)``.
      lookahead: K.
    """

    decode_step: DecodeStep
    states: Any
    lookahead: int = 4

    def begin(self, config: GenerationConfig) -> Any:
        made = self.states
        states = made(config.cache_length + self.lookahead) if callable(made) else made
        states = config.read_prefix(self.decode_step, states, 1)
        return rewind(states, jnp.full((config.batch,), config.start - 1, jnp.int32))

    def guess(self, known: Known, carried: Any) -> tuple[Array, Array | None, Any]:
        rows = known.lengths.shape[0]

        def one(carry, n):
            tokens, states = carry
            lengths = known.lengths + n
            last = jnp.take_along_axis(tokens, lengths[:, None, None] - 1, axis=2)
            logits, states = self.decode_step(last, states)
            logits = logits[:, :, 0].astype(jnp.float32)
            logits = known.config.process(known.processors, logits, tokens, lengths[:, None])[:, 0]
            if known.key is None:
                token = most_likely(logits)[0]
            else:
                uniform = jax.random.uniform(jax.random.fold_in(known.key, n), (rows,))
                token = topk.draw(logits, uniform)
            tokens = tokens.at[jnp.arange(rows), 0, lengths].set(token, mode="drop")
            return (tokens, states), (token, jax.nn.softmax(logits))

        states = rewind(carried, known.lengths - 1)
        # One step more than it guesses: should all be right, its cache holds the last of them too.
        (_, states), (tokens, drawn) = jax.lax.scan(
            one, (known.tokens, states), jnp.arange(self.lookahead + 1)
        )
        tokens = jnp.moveaxis(tokens, 0, 1)[:, :-1]
        return tokens, jnp.moveaxis(drawn, 0, 1)[:, :-1], states


@dataclass(frozen=True)
class PromptLookup:
    """What followed the last time that the newest tokens came, in a prompt or in the text so far.

    It costs no model, and pays where outputs copy from inputs.

    Attributes:
      prompt: [B P], in the vocabulary of what is generated.
      lookahead: K.
      ngram: the most tokens compared; the longest match wins, the latest of equals.

    Source: Saxena 2023, "Prompt lookup decoding".
    """

    prompt: Int[AnyArray, "B P"]
    lookahead: int = 8
    ngram: int = 3

    def begin(self, config: GenerationConfig) -> Any:
        return None

    def guess(self, known: Known, carried: Any) -> tuple[Array, Array | None, Any]:
        def one(prompt, tokens, length):
            text, P = jnp.concatenate([prompt, tokens]), prompt.shape[0]
            positions = jnp.arange(text.shape[0])
            matched, same = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, bool)
            for n in range(self.ngram):
                own = tokens[jnp.maximum(length - 1 - n, 0)]
                same = same & (jnp.roll(text, n) == own) & (positions >= n) & (n < length)
                matched = matched + same
            # Its own end is no match, and what stands behind it means nothing.
            matched = jnp.where(positions < P + length - 1, matched, 0)
            best = jnp.argmax(matched * text.shape[0] + positions * (matched > 0))
            following = best + 1 + jnp.arange(self.lookahead)
            return text[jnp.minimum(following, text.shape[0] - 1)]

        prompt = jnp.asarray(self.prompt, jnp.int32)
        return jax.vmap(one)(prompt, known.tokens[:, 0], known.lengths), None, carried
