"""GenerationConfig: what every search is told about the sequences to make, and how each of them begins."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossattn.decode.logits import processors as logits_processors
from crossattn.decode.logits.processors import LogitsProcessor
from crossattn.decode.states import DecodeStep, pad_left
from crossattn.types import AnyArray, Array, Bool, Float, Int


@dataclass(frozen=True)
class GenerationConfig:
    """The sequences to generate; every search takes these as keywords.

    Attributes:
      batch: rows, B.
      max_new_tokens: the most tokens generated, the end included. Static.
      limits: the most tokens of each row, [B] or one number; 0 leaves a row out. May be traced.
      prefix: the first input tokens, [P] or [B P], instead of ``bos_id`` alone: forced, not scored, not
        returned. All but the last enter the model in one step. Prompts of unlike lengths may be a list
        of lists; or an array with ``prefix_lengths``, each row's own tokens at its right end.
      prefix_lengths: how many tokens of each row of the prefix are its own, [B], 1 or more; what stands
        to the left of them is not read, by the model or by a processor. None: all of them. May be traced.
      bos_id: the first input token (the ``decoder_start_token_id`` of other libraries).
      eos_id: what ends a sequence: a token, or several; () is nothing but ``max_new_tokens``.
      pad_id: what follows the end.

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
        for name in ("batch", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 or more.")
        prefix: Any = self.bos_id if self.prefix is None else self.prefix
        lengths = self.prefix_lengths
        if lengths is None and _ragged(prefix):
            prefix, lengths = right_aligned(prefix, max(map(len, prefix)), self.pad_id)
        prefix = jnp.atleast_1d(jnp.asarray(prefix, jnp.int32))
        if (
            prefix.ndim > 2
            or 0 in prefix.shape
            or prefix.shape[:-1] not in ((), (1,), (self.batch,))
        ):
            raise ValueError(
                f"prefix has shape {prefix.shape}; expected [P] or [B P] = [{self.batch} P], P at least 1."
            )
        prefix = jnp.broadcast_to(prefix, (self.batch, prefix.shape[-1]))
        if lengths is not None:
            lengths = jnp.asarray(lengths, jnp.int32)
            if lengths.shape != (self.batch,):
                raise ValueError(
                    f"prefix_lengths has shape {lengths.shape}; expected [B] = [{self.batch}]."
                )
        object.__setattr__(self, "prefix", prefix)
        object.__setattr__(self, "prefix_lengths", lengths)
        object.__setattr__(self, "start", prefix.shape[-1])

    @property
    def cache_length(self) -> int:
        """Positions that a cache needs: the last token that is generated is never read."""
        return self.start + self.max_new_tokens - 1

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        return (self.eos_id,) if isinstance(self.eos_id, (int, np.integer)) else tuple(self.eos_id)

    def ended(self, tokens: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Where a token ends its sequence."""
        ended = jnp.zeros(tokens.shape, bool)
        for end in self.ends:
            ended |= tokens == end
        return ended

    def row_limits(self) -> Int[Array, "#B"]:
        """The most tokens generated in each row."""
        limits = self.max_new_tokens if self.limits is None else self.limits
        return jnp.minimum(jnp.atleast_1d(jnp.asarray(limits, jnp.int32)), self.max_new_tokens)

    def tokens(self, num_beams: int) -> Int[Array, "B J X"]:
        """The prefix, and padding for ``max_new_tokens`` tokens, X in all."""
        padding = jnp.full((self.batch, self.max_new_tokens), self.pad_id, jnp.int32)
        tokens = jnp.concatenate([self.prefix, padding], axis=1)
        return jnp.repeat(tokens[:, None], num_beams, axis=1)

    @property
    def padding(self) -> Int[Array, " B"]:
        """How many tokens of padding stand before each row's own."""
        lengths = self.start if self.prefix_lengths is None else self.prefix_lengths
        return jnp.broadcast_to(self.start - jnp.asarray(lengths, jnp.int32), (self.batch,))

    def process(
        self,
        processors: Sequence[LogitsProcessor],
        logits: Float[Array, "B J V"],
        tokens: Int[Array, "B J X"],
        length: Int[Array, "..."],
    ) -> Float[Array, "B J V"]:
        """Logits after all processors, which see of each row only what is its own."""
        padding = None if self.prefix_lengths is None else self.padding
        return logits_processors.apply(processors, logits, tokens, length, self.start, padding)

    def unread(self, states: Any) -> Any:
        """States that have read nothing yet, told what of each row is padding."""
        return states if self.prefix_lengths is None else pad_left(states, self.padding)

    def read_prefix(self, decode_step: DecodeStep, states: Any, num_beams: int) -> Any:
        """States that have read the prefix but for its last token."""
        states = self.unread(states)
        if self.start == 1:
            return states
        known = jnp.repeat(self.prefix[:, None, :-1], num_beams, axis=1)
        return decode_step(known, states)[1]


def right_aligned(
    rows: Sequence[Sequence[int]], width: int, pad_id: int = 0
) -> tuple[Int[np.ndarray, "B P"], Int[np.ndarray, " B"]]:
    """Rows of unlike lengths as an array, each at its right end, and their lengths.

    Raises:
      ValueError: a row is empty.
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    if not lengths.all():
        raise ValueError(f"prefix {lengths.argmin()} is empty; expected 1 token or more.")
    filled = [[pad_id] * (width - len(row)) + list(row) for row in rows]
    return np.array(filled, np.int32), lengths


def _ragged(prefix: Any) -> bool:
    """Whether it is lists of unlike lengths."""
    if not isinstance(prefix, Sequence) or not all(isinstance(row, Sequence) for row in prefix):
        return False
    return len({len(row) for row in prefix}) > 1


def token_ids(ids: int | Sequence[int] | AnyArray) -> Int[Array, " n"]:
    """Token numbers as an array."""
    return jnp.atleast_1d(jnp.asarray(ids, jnp.int32))
