"""Simultaneous decoding: a text is written while its source arrives, and nothing written is taken back.

    source    the old | harbour | is closed | .          parts, as they arrive
    written           | le vieux port |     | est fermé . <end>

After each part the model reads all of the source that has arrived and all that it has written, and writes on
until its policy waits for more. The end is written only when the source is complete, and then the rest is
what ``greedy`` writes.

A policy is a value with ``capture``, the attention that it looks at or None, and ``writes(weights [B M N S],
written [B], heard [B]) -> [B]``: whether the next token is written now. Those here are pytrees of their
numbers, so that one program serves all numbers.

Source: ``AlignAtt``, Papi et al. 2023, "AlignAtt: Using Attention-based Audio-Translation Alignments as a
Guide for Simultaneous Speech Translation"; ``WaitK``, Ma et al. 2019, "STACL".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.decode.capture import Capture, captured
from crossattn.decode.config import GenerationConfig
from crossattn.decode.logits.processors import LogitsProcessor
from crossattn.decode.search.greedy import likeliest
from crossattn.decode.states import method
from crossattn.nn.readied import for_decoding
from crossattn.types import AnyArray, Array, Bool, Float, Int


@partial(jax.tree_util.register_dataclass, data_fields=["newest"], meta_fields=["heads"])
@dataclass(frozen=True)
class AlignAtt:
    """Waits where the next token looks at the newest part of the source.

    A token is written unless the place with the largest weight, the mean of the heads, is among the last
    ``newest`` that have arrived, or behind them (in padding that is heard, as Whisper hears silence).

    Attributes:
      newest: places of the source, f in the paper; may be traced.
      heads: (layer, head) whose weights are averaged, from 0.

    Raises:
      ValueError: ``newest`` is below 1 or there are no heads; by the search, if there is no such head.
    """

    newest: int | Int[Array, ""]
    heads: tuple[tuple[int, int], ...]

    capture = Capture()

    def __post_init__(self):
        if isinstance(self.newest, int) and self.newest < 1:
            raise ValueError(f"AlignAtt: newest is {self.newest}; expected 1 or more places.")
        if not self.heads:
            raise ValueError("AlignAtt: heads is empty; expected (layer, head), one or more.")

    def writes(
        self, weights: Float[Array, "B M N S"], written: Any, heard: Int[Array, " B"]
    ) -> Bool[Array, " B"]:
        """Returns whether the place that the heads read most is none of the newest."""
        M, N = weights.shape[1:3]
        for layer, head in self.heads:
            if not (0 <= layer < M and 0 <= head < N):
                raise ValueError(
                    f"AlignAtt: heads has ({layer}, {head}); the model has {M} layers of {N} heads, from 0."
                )
        layers, heads = jnp.array(self.heads).T
        return jnp.argmax(weights[:, layers, heads].mean(1), axis=-1) < heard - self.newest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WaitK:
    """Writes the first token when ``k`` units of the source are there, and one more with each further unit.

    Attributes:
      k: units; it and ``unit`` may be traced.
      unit: places of the source in a unit: 1 for tokens, more for frames.

    Raises:
      ValueError: ``k`` or ``unit`` is below 1.
    """

    k: int | Int[Array, ""]
    unit: int | Int[Array, ""] = 1

    capture = None

    def __post_init__(self):
        for name in ("k", "unit"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"WaitK: {name} is {value}; expected 1 or more.")

    def writes(
        self, weights: Any, written: Int[Array, " B"], heard: Int[Array, " B"]
    ) -> Bool[Array, " B"]:
        """Returns whether enough has been heard for another token."""
        return heard >= (self.k + written) * self.unit


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SoFar:
    """Texts that are being written.

    Attributes:
      tokens: [B X], the prefix, what was written, padding.
      lengths: [B], number of written tokens, the end included.
      places: [B T], places of the source that had arrived when each token was written; 0 for padding.
      scores: [B], sums of log-probabilities.
      done: [B], whether the text has its end.
    """

    tokens: Int[AnyArray, "B X"]
    lengths: Int[AnyArray, " B"]
    places: Int[AnyArray, "B T"]
    scores: Float[AnyArray, " B"]
    done: Bool[AnyArray, " B"]

    @classmethod
    def begin(cls, config: GenerationConfig) -> "SoFar":
        """Returns texts of which nothing is written."""
        none = jnp.zeros((config.batch,), jnp.int32)
        places = jnp.zeros((config.batch, config.max_new_tokens), jnp.int32)
        done = jnp.broadcast_to(config.row_limits() < 1, none.shape)
        return cls(config.tokens(1)[:, 0], none, places, none.astype(jnp.float32), done)

    @property
    def written(self) -> Int[AnyArray, "B T"]:
        """The tokens without the prefix."""
        return self.tokens[:, -self.places.shape[1] :]


@dataclass(frozen=True)
class Simultaneous:
    """The search of simultaneous decoding, one text a row.

        search = Simultaneous(AlignAtt(2, heads=((1, 0),)), GenerationConfig(batch=1, max_new_tokens=60))
        so_far = SoFar.begin(search.config)
        for part in parts:  # one program, since the shapes stay
            so_far = hear(params, so_far, *part)

    Attributes:
      policy: ``AlignAtt``, ``WaitK``, or your own value, see above.
      config: lengths, prefix and special tokens.
      processors: logits processors, applied in order.
    """

    policy: Any
    config: GenerationConfig
    processors: Sequence[LogitsProcessor] = ()

    def hear(
        self,
        model: Any,
        so_far: SoFar,
        heard: Int[AnyArray, " B"],
        complete: Bool[AnyArray, " B"],
        **inputs: Any,
    ) -> SoFar:
        """Writes on after a part of the source.

        Args:
          model: such as a ``Transformer``; its states can ``rewind``.
          so_far: of ``SoFar.begin``, or of the call before.
          heard: places of the source that have arrived, in places of its memory [B S].
          complete: whether that is all.
          inputs: of ``prefill``, with the same shapes in each call: a source of its full length, of which
            ``source_segment_ids`` hide what has not arrived.

        Raises:
          ValueError: the states lack ``rewind``, or the policy does not fit the model.
        """
        model, config = for_decoding(model), self.config
        heard, complete = jnp.asarray(heard), jnp.asarray(complete)
        states = model.prefill(config.batch, 1, config.cache_length, **inputs)
        states = config.unread(states)
        if config.cache_length:  # the newest token is left to the loop
            states = model.decode_step(so_far.tokens[:, None, :-1], states)[1]
        states = method(states, "rewind")(jnp.asarray(config.start - 1 + so_far.lengths))

        def advance(carry: tuple) -> tuple:
            so_far, states, _ = carry
            at = config.start + so_far.lengths
            last = jnp.take_along_axis(so_far.tokens, at[:, None] - 1, axis=1)
            logits, states, [seen] = captured(
                model.decode_step, [self.policy.capture], last[:, None], states
            )
            logits = logits[:, :, 0].astype(jnp.float32)
            texts = config, self.processors, so_far.tokens[:, None], at[:, None]
            chosen, log_p = likeliest(logits, *texts)
            weights = None if seen is None else seen[:, 0, 0]
            may = self.policy.writes(weights, so_far.lengths, heard) & ~config.ended(chosen)
            going = carry[-1] & (complete | may)
            so_far = self._append(so_far, going, chosen, log_p, heard)
            return so_far, states, going & ~so_far.done

        begun = so_far, states, ~so_far.done
        return jax.lax.while_loop(lambda carry: jnp.any(carry[-1]), advance, begun)[0]

    def _append(
        self, so_far: SoFar, going: Array, chosen: Array, log_p: Array, heard: Array
    ) -> SoFar:
        """Writes a token of each row that is ``going``."""
        B, config, count = len(going), self.config, so_far.lengths
        row, lengths = jnp.arange(B), count + going

        def put(array: Any, at: Any, new: Any) -> Array:
            return array.at[row, jnp.where(going, at, array.shape[1])].set(new, mode="drop")

        return replace(
            so_far,
            tokens=put(so_far.tokens, config.start + count, chosen),
            places=put(so_far.places, count, heard),
            lengths=lengths,
            scores=jnp.where(going, so_far.scores + log_p, so_far.scores),
            done=so_far.done | (going & (config.ended(chosen) | (lengths >= config.row_limits()))),
        )


def write_along(
    search: Simultaneous,
    model: Any,
    source: Int[AnyArray, "B S"],
    source_segment_ids: Int[AnyArray, "B S"],
    step: int = 1,
) -> SoFar:
    """Writes the texts of sources of tokens that arrive ``step`` tokens at a time, in one program."""
    segments = jnp.asarray(source_segment_ids)
    S, lengths = segments.shape[1], jnp.sum(segments > 0, axis=1)

    def part(so_far: SoFar, heard: Array) -> tuple[SoFar, None]:
        arrived = jnp.where(jnp.arange(S) < heard, segments, 0)
        inputs = dict(source=jnp.asarray(source), source_segment_ids=arrived)
        heard = jnp.minimum(heard, lengths)
        return search.hear(model, so_far, heard, heard >= lengths, **inputs), None

    return jax.lax.scan(part, SoFar.begin(search.config), jnp.arange(step, S + step, step))[0]
