"""One token after the other, the most likely or a drawn one, in one ``while_loop`` that ends early."""

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
from crossattn.decode.states import DecodeStep
from crossattn.ops.promotion import as_written
from crossattn.types import Array, Bool, Float, Int, Key


@as_written
def greedy(
    decode_step: DecodeStep,
    states: Any,
    *,
    processors: Sequence[LogitsProcessor] = (),
    capture: Capture | None = None,
    **config: Any,
) -> Hypotheses:
    """One hypothesis a row: the most likely token at each step.

    Args:
      decode_step: a model's.
      states: what the model's ``prefill`` made for one sequence a row and at least
        ``GenerationConfig.cache_length`` positions.
      processors: what to forbid or reweigh, see ``processors``.
      capture: which cross-attention to return.
      **config: ``batch`` and ``max_new_tokens``, and what else ``GenerationConfig`` has.

    Returns:
      Hypotheses with J = 1; the score is the sum of the model's own log-probabilities.
    """
    return search(
        OneByOne(decode_step, GenerationConfig(**config), tuple(processors), capture), states
    )


@as_written
def sample(
    decode_step: DecodeStep,
    states: Any,
    *,
    key: Key[Array, "*#B"],
    processors: Sequence[LogitsProcessor] = (),
    capture: Capture | None = None,
    **config: Any,
) -> Hypotheses:
    """One hypothesis a row, each token drawn from the distribution that the processors leave.

    As ``greedy``; ``processors`` such as ``sampling.temperature`` and ``sampling.top_p`` shape the
    distribution. Scores are the model's own log-probabilities, whatever shaped it.

    Args:
      key: one for all rows; or one for each [B], whose draws are then the same in any batch.

    Raises:
      ValueError: there are several keys, and not as many as rows.
    """
    if key.shape not in ((), (config["batch"],)):
        raise ValueError(
            f"key has shape {key.shape}; expected one key, or one for each row [{config['batch']}]."
        )
    return search(
        OneByOne(decode_step, GenerationConfig(**config), tuple(processors), capture, key), states
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Progress:
    """Where the loop stands.

    Attributes:
      length: how many tokens there are, the prefix included.
      tokens: [B 1 X], prefix, generated tokens, padding.
      last: the newest token of each row.
      lengths: how many tokens of each row were generated, its end included.
      weights: captured attention, or None.
    """

    length: Int[Array, ""]
    tokens: Int[Array, "B 1 X"]
    last: Int[Array, " B"]
    lengths: Int[Array, " B"]
    scores: Float[Array, " B"]
    done: Bool[Array, " B"]
    states: Any
    weights: Float[Array, "B 1 T M N S"] | None


@dataclass(frozen=True)
class OneByOne:
    """The loop of greedy decoding and of sampling, in parts, so that it can run piece by piece."""

    decode_step: DecodeStep
    config: GenerationConfig
    processors: tuple[LogitsProcessor, ...] = ()
    capture: Capture | None = None
    key: Any = None

    def begin(self, states: Any) -> Progress:
        """Nothing generated, the prefix read."""
        config = self.config
        shape = config.batch, 1
        weights = empty_weights(
            self.decode_step, self.capture, states, shape, config.max_new_tokens
        )
        return Progress(
            length=jnp.int32(config.start),
            tokens=config.tokens(1),
            last=config.prefix[:, -1],
            lengths=jnp.zeros((config.batch,), jnp.int32),
            scores=jnp.zeros((config.batch,), jnp.float32),
            done=jnp.broadcast_to(config.row_limits() < 1, (config.batch,)),
            states=config.read_prefix(self.decode_step, states, 1),
            weights=weights,
        )

    def unfinished(self, progress: Progress) -> Bool[Array, ""]:
        """Whether a row lacks its end."""
        return (progress.length < progress.tokens.shape[-1]) & ~jnp.all(progress.done)

    def advance(self, progress: Progress) -> Progress:
        """One token more."""
        config, count = self.config, progress.length - self.config.start
        logits, states, [seen] = captured(
            self.decode_step, [self.capture], progress.last[:, None, None], progress.states
        )
        best, log_p = self._choose(logits[:, :, 0].astype(jnp.float32), progress)
        best = jnp.where(progress.done, config.pad_id, best)
        done = progress.done | config.ended(best) | (count + 1 >= config.row_limits())
        weights: Any = progress.weights
        if seen is not None:
            weights = jax.lax.dynamic_update_slice_in_dim(weights, seen, count, axis=2)
        return Progress(
            length=progress.length + 1,
            tokens=jax.lax.dynamic_update_slice_in_dim(
                progress.tokens, best[:, None, None], progress.length, axis=2
            ),
            last=best,
            lengths=progress.lengths + ~progress.done,
            scores=jnp.where(progress.done, progress.scores, progress.scores + log_p),
            done=done,
            states=states,
            weights=weights,
        )

    def finish(self, progress: Progress) -> Hypotheses:
        """What was generated."""
        tokens = progress.tokens[..., self.config.start :]
        return Hypotheses.of(
            tokens, progress.scores[:, None], progress.lengths[:, None], progress.weights
        )

    def _choose(
        self, logits: Float[Array, "B 1 V"], progress: Progress
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """The next token of each row, and its log-probability before any processing."""
        if self.key is None and not self.processors:
            return most_likely(logits[:, 0])
        processed = self.config.process(self.processors, logits, progress.tokens, progress.length)
        if self.key is None:
            chosen, _ = most_likely(processed[:, 0])
        else:
            chosen = topk.draw(processed[:, 0], self._uniform(progress.length))
        return chosen, log_p_of(logits[:, 0], chosen)

    def _uniform(self, length: Int[Array, ""]) -> Float[Array, " B"]:
        """What is drawn with at this length, a number for each row."""
        if self.key.ndim == 0:
            return jax.random.uniform(jax.random.fold_in(self.key, length), (self.config.batch,))
        return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, length)))(self.key)


def search(loop: OneByOne, states: Any) -> Hypotheses:
    """From beginning to end."""
    return loop.finish(jax.lax.while_loop(loop.unfinished, loop.advance, loop.begin(states)))


def most_likely(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The first of the most likely tokens, and its log-probability.

    On CPU, XLA's argmax takes four times as long as these plain reductions.
    """
    V = logits.shape[-1]
    highest = jnp.max(logits, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(logits == highest, jnp.arange(V), V), axis=-1)
    log_p = -jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1))
    return jnp.minimum(first, V - 1).astype(jnp.int32), log_p  # V - 1: all are NaN


def log_p_of(logits: Float[Array, "*B V"], tokens: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """The log-probability of one token a row."""
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(logits, axis=-1)
