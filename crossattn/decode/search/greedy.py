"""Greedy decoding and sampling: one token after the other in one ``while_loop`` that ends early."""

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
    rules: Sequence[LogitsProcessor] = (),
    processors: Sequence[LogitsProcessor] = (),
    capture: Capture | None = None,
    **config: Any,
) -> Hypotheses:
    """Generates one hypothesis a row, of the most likely token at each step.

    Args:
      decode_step: the model's.
      states: made by the model's ``prefill`` for one sequence a row and at least
        ``GenerationConfig.cache_length`` positions.
      rules: logits processors that come first and count as the model's: scores are measured after them.
      processors: logits processors, applied in order.
      capture: layers and heads whose cross-attention is returned.
      **config: ``batch``, ``max_new_tokens`` and the other fields of ``GenerationConfig``.

    Returns:
      Hypotheses with J = 1; the score is the sum of the model's own log-probabilities.
    """
    return _search(decode_step, states, processors, capture, None, rules, config)


@as_written
def sample(
    decode_step: DecodeStep,
    states: Any,
    *,
    key: Key[Array, "*#B"],
    rules: Sequence[LogitsProcessor] = (),
    processors: Sequence[LogitsProcessor] = (),
    capture: Capture | None = None,
    **config: Any,
) -> Hypotheses:
    """Draws one hypothesis a row from the distribution after the processors.

    The arguments and the result are those of ``greedy``; scores are the model's own log-probabilities.

    Args:
      key: one for all rows; or one for each [B], whose draws do not depend on the batch.

    Raises:
      ValueError: the number of keys is neither 1 nor that of the rows.
    """
    if key.shape not in ((), (config["batch"],)):
        raise ValueError(
            f"key has shape {key.shape}; expected one key, or one for each row [{config['batch']}]."
        )
    return _search(decode_step, states, processors, capture, key, rules, config)


def _search(decode_step, states, processors, capture, key, rules, config) -> Hypotheses:
    config, processors, rules = GenerationConfig(**config), tuple(processors), tuple(rules)
    loop = OneByOne(decode_step, config, processors, capture, key, rules)
    end = jax.lax.while_loop(Progress.unfinished, loop.advance, loop.begin(states))
    return end.hypotheses(loop.config)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Progress:
    """State of a search that generates one token a row at each step.

    Attributes:
      length: number of tokens, the prefix included.
      tokens: prefix, generated tokens, padding.
      last: newest token of each row.
      lengths: number of generated tokens of each row, the end included.
      weights: captured attention; None without a ``Capture``.
    """

    length: Int[Array, ""]
    tokens: Int[Array, "B 1 X"]
    last: Int[Array, " B"]
    lengths: Int[Array, " B"]
    scores: Float[Array, " B"]
    done: Bool[Array, " B"]
    states: Any
    weights: Float[Array, "B 1 T M N S"] | None

    @classmethod
    def begin(cls, config: GenerationConfig, states: Any, weights: Array | None) -> "Progress":
        """Returns the state before the first generated token."""
        return cls(
            length=jnp.int32(config.start),
            tokens=config.tokens(1),
            last=config.prefix[:, -1],
            lengths=jnp.zeros((config.batch,), jnp.int32),
            scores=jnp.zeros((config.batch,), jnp.float32),
            done=jnp.broadcast_to(config.row_limits() < 1, (config.batch,)),
            states=states,
            weights=weights,
        )

    def unfinished(self) -> Bool[Array, ""]:
        """Returns whether a row lacks its end."""
        return (self.length < self.tokens.shape[-1]) & ~jnp.all(self.done)

    def append(
        self,
        config: GenerationConfig,
        chosen: Int[Array, " B"],
        log_p: Float[Array, " B"],
        states: Any,
        seen: Float[Array, "B 1 1 M N S"] | None,
    ) -> "Progress":
        """Appends one token to each row, with its log-probability and its attention."""
        count, put = self.length - config.start, jax.lax.dynamic_update_slice_in_dim
        chosen = jnp.where(self.done, config.pad_id, chosen)
        weights: Any = self.weights
        return Progress(
            length=self.length + 1,
            tokens=put(self.tokens, chosen[:, None, None], self.length, axis=2),
            last=chosen,
            lengths=self.lengths + ~self.done,
            scores=jnp.where(self.done, self.scores, self.scores + log_p),
            done=self.done | config.ended(chosen) | (count + 1 >= config.row_limits()),
            states=states,
            weights=None if seen is None else put(weights, seen, count, axis=2),
        )

    def hypotheses(self, config: GenerationConfig) -> Hypotheses:
        """Returns the generated tokens of each row."""
        tokens = self.tokens[..., config.start :]
        return Hypotheses.of(tokens, self.scores[:, None], self.lengths[:, None], self.weights)


@dataclass(frozen=True)
class OneByOne:
    """Loop of greedy decoding and of sampling, in parts that ``Bucketed.stream`` runs piece by piece."""

    decode_step: DecodeStep
    config: GenerationConfig
    processors: tuple[LogitsProcessor, ...] = ()
    capture: Capture | None = None
    key: Any = None
    rules: tuple[LogitsProcessor, ...] = ()

    def begin(self, states: Any) -> Progress:
        """Reads the prefix."""
        config, step = self.config, self.decode_step
        shape = config.batch, 1
        weights = empty_weights(step, self.capture, states, shape, config.max_new_tokens)
        return Progress.begin(config, config.read_prefix(step, states, 1), weights)

    def advance(self, progress: Progress) -> Progress:
        """Generates one token a row."""
        logits, states, [seen] = captured(
            self.decode_step, [self.capture], progress.last[:, None, None], progress.states
        )
        chosen, log_p = self._choose(logits[:, :, 0].astype(jnp.float32), progress)
        return progress.append(self.config, chosen, log_p, states, seen)

    def _choose(
        self, logits: Float[Array, "B 1 V"], progress: Progress
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """Returns the next token of each row, and its log-probability before the processors."""
        texts = progress.tokens, progress.length
        logits = self.config.process(self.rules, logits, *texts)
        if self.key is None:
            return likeliest(logits, self.config, self.processors, *texts)
        processed = self.config.process(self.processors, logits, *texts)
        chosen = topk.draw(processed[:, 0], self._uniform(progress.length))
        return chosen, log_p_of(logits[:, 0], chosen)

    def _uniform(self, length: Int[Array, ""]) -> Float[Array, " B"]:
        """Draws a number for each row at this length, by the number of the new token."""
        new = length - self.config.start + 1  # prefixes of a batch are as wide as its longest
        if self.key.ndim == 0:
            return jax.random.uniform(jax.random.fold_in(self.key, new), (self.config.batch,))
        return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, new)))(self.key)


def likeliest(
    logits: Float[Array, "B 1 V"],
    config: GenerationConfig,
    processors: Sequence[LogitsProcessor],
    tokens: Int[Array, "B 1 X"],
    length: Int[Array, "..."],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Returns the likeliest token of each row after the processors, and its log-probability before them.

    Args:
      tokens, length: what the processors see; see ``processors.apply``.
    """
    if not processors:
        return most_likely(logits[:, 0])
    chosen, _ = most_likely(config.process(processors, logits, tokens, length)[:, 0])
    return chosen, log_p_of(logits[:, 0], chosen)


def most_likely(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Returns the first of the most likely tokens, and its log-probability.

    On CPU, XLA's argmax takes four times as long as these plain reductions.
    """
    V = logits.shape[-1]
    highest = jnp.max(logits, axis=-1, keepdims=True)
    first = jnp.min(jnp.where(logits == highest, jnp.arange(V), V), axis=-1)
    log_p = -jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1))
    return jnp.minimum(first, V - 1).astype(jnp.int32), log_p  # V - 1: all are NaN


def log_p_of(logits: Float[Array, "*B V"], tokens: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Returns the log-probability of one token a row."""
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(logits, axis=-1)
