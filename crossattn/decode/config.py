"""GenerationConfig: sizes, prefix and special tokens of the sequences that a search generates."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossattn.decode.logits import processors as logits_processors
from crossattn.decode.logits.processors import LogitsProcessor
from crossattn.decode.states import DecodeStep, method
from crossattn.types import Array, Bool, Float, Int


@dataclass(frozen=True)
class GenerationConfig:
    """Sequences to generate; every search takes these fields as keywords.

    Attributes:
      batch: rows, B.
      max_new_tokens: largest number of generated tokens, the end included. Static.
      limits: largest number of tokens of each row, [B] or one number; 0 leaves a row out. May be traced.
      prefix: first input tokens, [P] or [B P], instead of ``bos_id`` alone: neither scored nor returned. All
        but the last enter the model in one step. Prompts of unlike lengths are a list of lists; or an array
        with ``prefix_lengths``, aligned at the right.
      prefix_lengths: number of tokens of each row's own prefix, [B], 1 or more; the tokens to the left of
        them are padding, hidden from model and processors. None: no padding. May be traced.
      bos_id: first input token (the ``decoder_start_token_id`` of other libraries).
      eos_id: token, or tokens, that end a sequence; with () only ``max_new_tokens`` does.
      pad_id: token after the end.

    Raises:
      ValueError: a size is below 1, or the prefix or its lengths do not fit the batch.
    """

    batch: int
    max_new_tokens: int
    limits: Any = None
    prefix: Any = None
    prefix_lengths: Any = None
    bos_id: int = 1
    eos_id: int | Sequence[int] = 2
    pad_id: int = 0
    start: int = field(init=False)

    def __post_init__(self):
        B = self.batch
        for name in ("batch", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 or more.")
        prefix: Any = self.bos_id if self.prefix is None else self.prefix
        lengths = self.prefix_lengths
        if lengths is None and _ragged(prefix):
            prefix, lengths = right_aligned(prefix, max(map(len, prefix)), self.pad_id)
        prefix = jnp.atleast_1d(jnp.asarray(prefix, jnp.int32))
        if prefix.shape[:-1] not in ((), (1,), (B,)) or 0 in prefix.shape:
            raise ValueError(
                f"prefix has shape {prefix.shape}; expected [P] or [B P] = [{B} P], P at least 1."
            )
        prefix = jnp.broadcast_to(prefix, (B, prefix.shape[-1]))
        if lengths is not None:
            lengths = jnp.asarray(lengths, jnp.int32)
            if lengths.shape != (B,):
                raise ValueError(f"prefix_lengths has shape {lengths.shape}; expected [B] = [{B}].")
        object.__setattr__(self, "prefix", prefix)
        object.__setattr__(self, "prefix_lengths", lengths)
        object.__setattr__(self, "start", prefix.shape[-1])

    @property
    def cache_length(self) -> int:
        """Number of positions of a cache, which never holds the last token."""
        return self.start + self.max_new_tokens - 1

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        return (self.eos_id,) if isinstance(self.eos_id, (int, np.integer)) else tuple(self.eos_id)

    def ended(self, tokens: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Returns which tokens end their sequences."""
        ended = jnp.zeros(tokens.shape, bool)
        for end in self.ends:
            ended |= tokens == end
        return ended

    def row_limits(self) -> Int[Array, "#B"]:
        """Returns the largest number of generated tokens of each row."""
        limits = self.max_new_tokens if self.limits is None else self.limits
        return jnp.minimum(jnp.atleast_1d(jnp.asarray(limits, jnp.int32)), self.max_new_tokens)

    def tokens(self, num_beams: int) -> Int[Array, "B J X"]:
        """Returns the prefix, and padding for ``max_new_tokens`` tokens, X in all."""
        padding = jnp.full((self.batch, self.max_new_tokens), self.pad_id, jnp.int32)
        tokens = jnp.concatenate([self.prefix, padding], axis=1)
        return jnp.repeat(tokens[:, None], num_beams, axis=1)

    @property
    def padding(self) -> Int[Array, " B"]:
        """Number of tokens of padding before each row's own prefix."""
        lengths = self.start if self.prefix_lengths is None else self.prefix_lengths
        return jnp.broadcast_to(self.start - jnp.asarray(lengths, jnp.int32), (self.batch,))

    def process(
        self,
        processors: Sequence[LogitsProcessor],
        logits: Float[Array, "B J V"],
        tokens: Int[Array, "B J X"],
        length: Int[Array, "..."],
    ) -> Float[Array, "B J V"]:
        """Applies processors, from which the padding of each row is hidden."""
        padding = None if self.prefix_lengths is None else self.padding
        return logits_processors.apply(processors, logits, tokens, length, self.start, padding)

    def unread(self, states: Any) -> Any:
        """Masks the padding of each row in states that have read nothing yet."""
        return states if self.prefix_lengths is None else method(states, "pad_left")(self.padding)

    def read_prefix(self, decode_step: DecodeStep, states: Any, num_beams: int) -> Any:
        """Reads the prefix but for its last token."""
        states = self.unread(states)
        if self.start == 1:
            return states
        known = jnp.repeat(self.prefix[:, None, :-1], num_beams, axis=1)
        return decode_step(known, states)[1]


def right_aligned(
    rows: Sequence[Sequence[int]], width: int, pad_id: int = 0
) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
    """Pads rows of unlike lengths on the left, and returns them with their lengths.

    Raises:
      ValueError: a row is empty.
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    if not lengths.all():
        raise ValueError(f"prefix {lengths.argmin()} is empty; expected 1 token or more.")
    filled = [[pad_id] * (width - len(row)) + list(row) for row in rows]
    return np.array(filled, np.int32), lengths


def _ragged(prefix: Any) -> bool:
    if not isinstance(prefix, Sequence) or not all(isinstance(row, Sequence) for row in prefix):
        return False
    return len({len(row) for row in prefix}) > 1
