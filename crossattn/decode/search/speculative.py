"""Speculative decoding: a draft guesses some tokens, the model verifies them all in one step.

Greedy output is the model's own, and drawn output has exactly the model's distribution, whatever the
draft. Each row has its own position, so that no row waits for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.decode.capture import Capture, captured, empty_weights
from crossattn.decode.config import GenerationConfig
from crossattn.decode.hypotheses import Hypotheses
from crossattn.decode.logits import topk
from crossattn.decode.logits.processors import LogitsProcessor
from crossattn.decode.search.drafts import Draft, Known
from crossattn.decode.search.greedy import log_p_of, most_likely
from crossattn.decode.states import DecodeStep, method
from crossattn.ops.promotion import as_written
from crossattn.types import Array, Bool, Float, Int, Key


@as_written
def speculative(
    decode_step: DecodeStep,
    states: Any,
    *,
    draft: Draft,
    key: Key[Array, ""] | None = None,
    processors: Sequence[LogitsProcessor] = (),
    capture: Capture | None = None,
    **config: Any,
) -> Hypotheses:
    """Generates the hypotheses of ``greedy``, or with a key draws as ``sample``, in fewer steps of the model.

    Args:
      decode_step, capture, **config: as in ``greedy``.
      states: made by the model's ``prefill`` for one sequence a row and
        ``GenerationConfig.cache_length + draft.lookahead`` positions; they can ``rewind``.
      draft: ``ModelDraft`` or ``PromptLookup``.
      key: draws tokens.
      processors: logits processors, applied in order, to the draft too.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023.
    """
    loop = _Speculation(
        decode_step, GenerationConfig(**config), draft, key, tuple(processors), capture
    )
    end = jax.lax.while_loop(lambda run: ~jnp.all(run.done), loop.advance, loop.begin(states))
    start, stop = loop.config.start, loop.config.start + loop.config.max_new_tokens
    weights = None if end.weights is None else end.weights[:, :, : stop - start]
    tokens = end.tokens[..., start:stop]
    return Hypotheses.of(tokens, end.scores[:, None], (end.lengths - start)[:, None], weights)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Speculated:
    lengths: Int[Array, " B"]
    rounds: Int[Array, ""]
    tokens: Int[Array, "B 1 X"]
    scores: Float[Array, " B"]
    done: Bool[Array, " B"]
    states: Any
    carried: Any
    weights: Float[Array, "B 1 T M N S"] | None


@dataclass(frozen=True)
class _Speculation:
    decode_step: DecodeStep
    config: GenerationConfig
    draft: Draft
    key: Any
    processors: tuple[LogitsProcessor, ...]
    capture: Capture | None

    def begin(self, states: Any) -> _Speculated:
        """Reads the prefix with the model and with the draft."""
        config, step, B, more = (
            self.config,
            self.decode_step,
            self.config.batch,
            self.draft.lookahead + 1,
        )
        weights = empty_weights(step, self.capture, states, (B, 1), config.max_new_tokens + more)
        read = config.read_prefix(step, states, 1)
        tokens = jnp.pad(config.tokens(1), ((0, 0), (0, 0), (0, more)))
        return _Speculated(
            lengths=jnp.full((B,), config.start, jnp.int32),
            rounds=jnp.int32(0),
            tokens=tokens,
            scores=jnp.zeros((B,), jnp.float32),
            done=jnp.broadcast_to(config.row_limits() < 1, (B,)),
            states=method(read, "rewind")(jnp.full((B,), config.start - 1, jnp.int32)),
            carried=self.draft.begin(config),
            weights=weights,
        )

    def advance(self, run: _Speculated) -> _Speculated:
        """Generates 1 to K + 1 tokens of each row."""
        config, keys = self.config, [None, None]
        if self.key is not None:
            keys = jax.random.split(jax.random.fold_in(self.key, run.rounds))
        known = Known(run.tokens, run.lengths, config, self.processors, keys[0])
        guessed, drawn, carried = self.draft.guess(known, run.carried)
        guessed = guessed.astype(jnp.int32)
        last = jnp.take_along_axis(run.tokens[:, 0], run.lengths[:, None] - 1, axis=1)
        logits, states, [seen] = captured(
            self.decode_step,
            [self.capture],
            jnp.concatenate([last, guessed], axis=1)[:, None],
            method(run.states, "rewind")(run.lengths - 1),
        )
        logits = logits[:, 0].astype(jnp.float32)
        if drawn is not None and drawn.shape[-1] != logits.shape[-1]:
            raise ValueError(
                f"the draft has {drawn.shape[-1]} tokens, the model {logits.shape[-1]}: a draft needs the "
                "vocabulary of the model that verifies it."
            )
        right, following = self._verify(
            self._process(logits, guessed, run), guessed, drawn, keys[1]
        )
        numbers = jnp.arange(guessed.shape[1] + 1)
        new = jnp.pad(guessed, ((0, 0), (0, 1)))
        new = jnp.where(numbers == right[:, None], following[:, None], new)
        kept, done = self._cut(new, right + 1, run)
        own = numbers < kept[:, None]
        log_p = jnp.where(own, log_p_of(logits, new), 0.0)
        new = jnp.where(own, new, config.pad_id)
        weights: Any = run.weights
        if seen is not None:
            weights = _put(weights[:, 0], seen[:, 0], run.lengths - config.start)[:, None]
        return _Speculated(
            lengths=run.lengths + kept,
            rounds=run.rounds + 1,
            tokens=_put(run.tokens[:, 0], new, run.lengths)[:, None],
            scores=run.scores + log_p.sum(-1),
            done=done,
            states=states,
            carried=carried,
            weights=weights,
        )

    def _process(
        self, logits: Float[Array, "B K V"], guessed: Int[Array, "B k"], run: _Speculated
    ) -> Float[Array, "B K V"]:
        """Applies processors to the logits after each guess."""
        if not self.processors:
            return logits
        tokens = _put(run.tokens[:, 0], guessed, run.lengths)
        tokens = jnp.repeat(tokens[:, None], logits.shape[1], axis=1)
        lengths = run.lengths[:, None] + jnp.arange(logits.shape[1])
        return self.config.process(self.processors, logits, tokens, lengths)

    def _verify(
        self,
        logits: Float[Array, "B K V"],
        guessed: Int[Array, "B k"],
        drawn: Float[Array, "B k V"] | None,
        key: Any,
    ) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """Returns the number of accepted guesses, and the token after them."""
        if key is None:
            own = most_likely(logits.reshape(-1, logits.shape[-1]))[0].reshape(logits.shape[:2])
            right = _leading(own[:, :-1] == guessed)
            return right, jnp.take_along_axis(own, right[:, None], axis=1)[:, 0]
        rows = jax.random.split(key, logits.shape[0])
        if drawn is None:
            drawn = jax.nn.one_hot(guessed, logits.shape[-1])
        return jax.vmap(verify)(rows, jax.nn.softmax(logits), guessed, drawn)

    def _cut(
        self, new: Int[Array, "B K"], count: Int[Array, " B"], run: _Speculated
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
        """Returns how many new tokens are kept, up to an end or a limit, and whether the row is done."""
        numbers = jnp.arange(new.shape[1])
        ends = self.config.ended(new) & (numbers < count[:, None])
        through_end = jnp.min(jnp.where(ends, numbers + 1, new.shape[1] + 1), axis=1)
        left = self.config.row_limits() - (run.lengths - self.config.start)
        kept = jnp.where(run.done, 0, jnp.minimum(jnp.minimum(count, through_end), left))
        return kept, run.done | (kept >= left) | (kept == through_end)


def verify(
    key: Key[Array, ""],
    wanted: Float[Array, "K V"],
    guessed: Int[Array, " k"],
    drawn: Float[Array, "k V"],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Returns the number of accepted guesses and the token after them; all have distribution ``wanted``.

    Args:
      wanted: the model's distributions after 0, 1, ... k guesses; K = k + 1.
      guessed: tokens drawn from ``drawn``, one after the other.
    """
    accept, draw = jax.random.split(key)
    p, q = (jnp.take_along_axis(x, guessed[:, None], axis=1)[:, 0] for x in (wanted[:-1], drawn))
    right = _leading(jax.random.uniform(accept, q.shape) * q < p)
    # The draft has already guessed too often the tokens that it favours more than the model.
    rest = jnp.maximum(wanted[right] - jnp.pad(drawn, ((0, 1), (0, 0)))[right], 0.0)
    rest = jnp.where(rest.sum() > 0, rest, wanted[right])
    return right, topk.draw(jnp.log(rest), jax.random.uniform(draw))


def _leading(right: Bool[Array, "*B k"]) -> Int[Array, "*B"]:
    """Counts the True before the first False."""
    return jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=-1), axis=-1)


def _put(x: Array, new: Array, start: Int[Array, " B"]) -> Array:
    """Writes ``new`` [B Y ...] into ``x`` [B X ...] from ``start`` on, in each row."""
    return jax.vmap(lambda x, new, at: jax.lax.dynamic_update_slice_in_dim(x, new, at, 0))(
        x, new, start
    )
