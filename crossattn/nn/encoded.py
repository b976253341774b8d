"""The output of an encoder: vectors of tokens, frames, patches or latents, or a concatenation of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops.exporting import exportable
from crossattn.types import AnyArray, Bool, Float, Int


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Encoded:
    """Vectors that a decoder reads.

    Attributes:
      vectors: [*B S D].
      valid: [*B S], False for padding; None is no padding.
      positions: [*#B S], of the vectors; None is ``arange``.
    """

    vectors: Float[AnyArray, "*B S D"]
    valid: Bool[AnyArray, "*B S"] | None = None
    positions: Int[AnyArray, "*#B S"] | None = None

    @classmethod
    def of(cls, vectors: Any, segment_ids: Int[AnyArray, "*B S"] | None = None) -> "Encoded":
        """Returns ``Encoded`` itself, or makes one of vectors [*B S D]; ``segment_ids`` 0 is padding."""
        encoded = vectors if isinstance(vectors, Encoded) else cls(vectors)
        return encoded if segment_ids is None else replace(encoded, valid=segment_ids > 0)

    @classmethod
    def empty(cls, batch_shape: Sequence[int], size: int, dim: int) -> "Encoded":
        """Returns vectors [*batch_shape size dim] of padding, room for those that come while decoding."""
        lead = (*batch_shape, size)
        return cls(jnp.zeros((*lead, dim)), jnp.zeros(lead, bool))

    @classmethod
    def concat(cls, *parts: "Encoded") -> "Encoded":
        """Concatenates parts along S.

        Parts without positions get their indices in the result.

        Raises:
          ValueError: no part is given, or parts differ in batch axes or in size.
        """
        if not parts:
            raise ValueError("Encoded.concat: got no part; expected at least one.")
        shapes = [part.vectors.shape for part in parts]
        if len({(*shape[:-2], shape[-1]) for shape in shapes}) > 1:
            raise ValueError(
                f"Encoded.concat: vectors have shapes {', '.join(map(str, shapes))}; expected equal batch "
                "axes and equal size, the last axis: project them to one."
            )
        start, positions = 0, []
        for part in parts:
            size = part.vectors.shape[-2]
            own = jnp.arange(start, start + size) if part.positions is None else part.positions
            # Split over a mesh as the vectors are.
            positions.append(jnp.zeros_like(part.vectors[..., 0], jnp.int32) + own)
            start += size
        numbered = any(part.positions is not None for part in parts)
        masked = any(part.valid is not None for part in parts)
        return cls(
            jnp.concatenate([part.vectors for part in parts], axis=-2),
            jnp.concatenate([part.readable for part in parts], axis=-1) if masked else None,
            jnp.concatenate(positions, axis=-1) if numbered else None,
        )

    @property
    def readable(self) -> Bool[AnyArray, "*B S"]:
        """The padding mask, True for vectors that may be read."""
        if self.valid is None:
            return jnp.ones_like(self.vectors[..., 0], bool)
        return jnp.broadcast_to(self.valid, self.vectors.shape[:-1])
