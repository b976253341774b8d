"""Drafts, which guess tokens for ``speculative`` to verify: a small model, or the prompt itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from crossattn.decode.config import GenerationConfig
from crossattn.decode.logits import topk
from crossattn.decode.logits.processors import LogitsProcessor
from crossattn.decode.search.greedy import most_likely
from crossattn.decode.states import DecodeStep, method
from crossattn.types import AnyArray, Array, Float, Int


class Known(NamedTuple):
    """Sequences of unlike lengths, with the configuration, processors and key that choose their tokens."""

    tokens: Int[Array, "B 1 X"]
    lengths: Int[Array, " B"]
    config: GenerationConfig
    processors: Sequence[LogitsProcessor]
    key: Any


@runtime_checkable
class Draft(Protocol):
    """Protocol of a source of guesses, ``lookahead`` tokens at a time."""

    lookahead: int

    def begin(self, config: GenerationConfig) -> Any:
        """Returns the state that the first guess starts from."""
        ...

    def guess(
        self, known: Known, carried: Any
    ) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None, Any]:
        """Returns tokens, the distributions that they were drawn from (None: one-hot), and its state."""
        ...


@dataclass(frozen=True)
class ModelDraft:
    """A smaller model of the same vocabulary.

    Attributes:
      decode_step: of the smaller model.
      states: made by its ``prefill`` for one sequence a row and ``GenerationConfig.cache_length + lookahead``
        positions; or a function of that number, ``lambda n: small.prefill(batch, 1, n, source=source)``.
      lookahead: K.
    """

    decode_step: DecodeStep
    states: Any
    lookahead: int = 4

    def begin(self, config: GenerationConfig) -> Any:
        made = self.states
        states = made(config.cache_length + self.lookahead) if callable(made) else made
        states = config.read_prefix(self.decode_step, states, 1)
        return method(states, "rewind")(jnp.full((config.batch,), config.start - 1, jnp.int32))

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

        states = method(carried, "rewind")(known.lengths - 1)
        # One step more than guesses: if all are right, the cache must hold the last one too.
        (_, states), (tokens, drawn) = jax.lax.scan(
            one, (known.tokens, states), jnp.arange(self.lookahead + 1)
        )
        tokens = jnp.moveaxis(tokens, 0, 1)[:, :-1]
        return tokens, jnp.moveaxis(drawn, 0, 1)[:, :-1], states


@dataclass(frozen=True)
class PromptLookup:
    """Draft that copies the tokens after an earlier occurrence of the newest ones, in prompt or text.

    It runs no model, and saves steps where outputs copy from inputs.

    Attributes:
      prompt: [B P], in the vocabulary of what is generated.
      lookahead: K.
      ngram: largest number of compared tokens; the longest match wins, the latest of equals.

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
            # The end of the text is no match of itself, and only padding follows it.
            matched = jnp.where(positions < P + length - 1, matched, 0)
            best = jnp.argmax(matched * text.shape[0] + positions * (matched > 0))
            following = best + 1 + jnp.arange(self.lookahead)
            return text[jnp.minimum(following, text.shape[0] - 1)]

        prompt = jnp.asarray(self.prompt, jnp.int32)
        return jax.vmap(one)(prompt, known.tokens[:, 0], known.lengths), None, carried
