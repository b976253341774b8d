"""Chunked cross-attention: a token reads what was retrieved for the last whole chunk of its text.

    tokens   0 .. m-2   m-1 .. 2m-2   2m-1 .. 3m-2   ..
    read     nothing    chunk 0's     chunk 1's      ..       of the memory [*B C K R M]

The last token of a chunk reads the chunk's neighbours already: it predicts a token of the next one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.positions import RelativeBias
from crossattn.ops import masks
from crossattn.ops.memory import Memory
from crossattn.types import Array, Bool, Float, Int, Key


class ChunkedAttention(nnx.Module):
    """Attention to a memory with one batch axis more: K neighbours of R vectors for each chunk of m tokens.

    The token at position t reads chunk ``(t + 1) // m - 1``, all its neighbours in one softmax. A token
    before the end of the first chunk, after the memory's last chunk, or whose chunk has no valid neighbour
    gets exactly 0.

    Args:
      attention: the attention to the memory of one chunk, such as ``MultiHeadAttention``.
      chunk: tokens of a chunk, m.
      relative: a bias of the distance from a query's place in its group of m tokens to the position of a
        neighbour's vector; None is none.

    Source: Borgeaud et al. 2022, "Improving Language Models by Retrieving from Trillions of Tokens", section
    2.4, equation 3, and listing 1.
    """

    def __init__(self, attention: nnx.Module, chunk: int, relative: RelativeBias | None = None):
        self.attention: Any = attention
        self.chunk = chunk
        self.relative: Any = relative

    @on_any_mesh
    def memory(
        self,
        x: Float[Array, "*B C K R M"],
        *,
        valid: Bool[Array, "*B C K R"] | None = None,
        positions: Int[Array, "..."] | None = None,
    ) -> Memory:
        """Projects neighbours [*B C K R M] to a memory [*B C (K R)] of each chunk.

        Args:
          x: neighbours.
          valid: False for padding.
          positions: of the vectors in their neighbour, [R] or [*B C K R], for ``relative``; None is
            ``arange``.

        Raises:
          ValueError: the neighbours lack an axis.
        """
        if x.ndim < 4:
            raise ValueError(
                f"ChunkedAttention.memory: x has shape {x.shape}; expected [*B C K R M], K neighbours of R "
                "vectors for each of C chunks."
            )
        lead, (K, R) = x.shape[:-4], x.shape[-3:-1]
        flat = (*lead, x.shape[-4], K * R)
        options: dict[str, Any] = {}
        if valid is not None:
            options["valid"] = valid.reshape(flat)
        if self.relative is not None:
            positions = jnp.arange(R) if positions is None else positions
            options["positions"] = jnp.broadcast_to(positions, x.shape[:-1]).reshape(flat)
        return self.attention.memory(x.reshape(*flat, x.shape[-1]), **options)

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Memory | Float[Array, "*B C K R M"],
        mask: None = None,
        *,
        positions: Int[Array, "*#B T"] | None = None,
        dropout_key: Key[Array, ""] | None = None,
        return_weights: bool = False,
        edit: Callable[[Array], Array] | None = None,
    ) -> Any:
        """Reads the memory of each token's chunk.

        Args:
          x: [*B T D].
          memory: a result of ``memory``, or neighbours.
          mask: None; what may not be read is not ``valid``.
          positions: of the tokens in their text, [*B T] or [T], no farther from one another than T; None is
            a whole text from its first token on, of which no chunk is computed that a token does not read.
          dropout_key: turns dropout on.
          return_weights: also return the weights [*B N T (K R)] on the neighbours of the token's chunk.
          edit: changes what heads read, [*B C m N Hv] of a whole text and [*B T N Hv] at ``positions``.

        Raises:
          ValueError: a mask is given; the memory has not the batch axes of ``x`` and one of chunks; or not as
            many chunks as a whole text.
        """
        if mask is not None:
            raise ValueError("ChunkedAttention takes no mask; expected valid= of its memory.")
        memory = memory if isinstance(memory, Memory) else self.memory(memory)
        batch, own = x.shape[:-2], memory.keys.shape[:-3]
        if own[:-1] != batch or not own:
            raise ValueError(
                f"x has batch axes {batch}, and the memory of chunks {own}; expected the same and one more, "
                "the chunks."
            )
        options: dict[str, Any] = dict(dropout_key=dropout_key, return_weights=return_weights)
        options |= {} if edit is None else dict(edit=edit)
        if positions is None:
            out, weights = self._whole(x, memory, options)
        else:
            out, weights = self._at(x, memory, positions, options)
        return (out, weights) if return_weights else out

    def _whole(self, x: Array, memory: Memory, options: dict[str, Any]) -> tuple:
        """Reads each chunk's memory with the m tokens from the chunk's last one on."""
        T, m, C = x.shape[-2], self.chunk, memory.keys.shape[-4]
        if C != T // m:
            raise ValueError(
                f"a text of {T} tokens has {T // m} whole chunks of {m}, but the memory has {C}; expected "
                "neighbours of each whole chunk."
            )
        late = x[..., m - 1 :, :]
        late = _padded(late, 0, C * m - late.shape[-2])
        groups = late.reshape(*x.shape[:-2], C, m, x.shape[-1])
        options |= self._bias(jnp.arange(m), memory)
        out, weights = _pair(self.attention(groups, memory, **options))
        if memory.valid is not None:
            out = jnp.where(memory.readable.any(-1)[..., None, None], out, 0)
        out = _padded(out.reshape(*late.shape[:-1], out.shape[-1]), m - 1, 0)[..., :T, :]
        if weights is None:
            return out, None
        weights = jnp.moveaxis(weights, -4, -3)  # [*B N C m S]
        weights = weights.reshape(*weights.shape[:-3], C * m, weights.shape[-1])
        return out, _padded(weights, m - 1, 0)[..., :T, :]

    def _at(self, x: Array, memory: Memory, positions: Array, options: dict[str, Any]) -> tuple:
        """Reads the few chunks that tokens at these positions may read, each token its own."""
        (*batch, T, _), m, axis = x.shape, self.chunk, x.ndim - 2
        C, S = memory.keys.shape[-4:-2]
        chunks = (positions + 1) // m - 1
        count = min(C, (T + m - 2) // m + 1)
        first = jnp.clip(chunks.min(-1), 0, C - count)
        taken = first[..., None] + jnp.arange(count)

        def part(slots: Any) -> Any:
            """Returns the chunks that are read, one after the other, [*B C S ...] -> [*B (count S) ...]."""
            if slots is None:
                return None
            if taken.ndim == 1:
                slots = jax.lax.dynamic_slice_in_dim(slots, first, count, axis)
            else:
                index = jnp.broadcast_to(taken, (*batch, count))
                index = index.reshape(*index.shape, *(1,) * (slots.ndim - index.ndim))
                slots = jnp.take_along_axis(slots, index, axis=axis)
            return slots.reshape(*batch, count * S, *slots.shape[axis + 2 :])

        near = Memory(*map(part, (memory.keys, memory.values, memory.valid, memory.positions)))
        ids = jnp.where((chunks >= 0) & (chunks < C), chunks - first[..., None] + 1, 0)
        numbers = jnp.repeat(jnp.arange(1, count + 1), S)
        mask = masks.segments(ids, jnp.broadcast_to(numbers, (*ids.shape[:-1], count * S)))
        options |= self._bias((positions + 1) % m, near)
        out, weights = _pair(self.attention(x, near, mask, **options))
        reads = jnp.broadcast_to(ids > 0, x.shape[:-1])
        if near.valid is not None:
            found = near.valid.reshape(*batch, count, S).any(-1)
            ids = jnp.broadcast_to(jnp.maximum(ids - 1, 0), reads.shape)
            reads = reads & jnp.take_along_axis(found, ids, axis=-1)
        out = jnp.where(reads[..., None], out, 0)
        if weights is None:
            return out, None
        return out, weights.reshape(*weights.shape[:-1], count, S).sum(-2)

    def _bias(self, places: Array, memory: Memory) -> dict[str, Any]:
        """Returns the bias of queries at these places of their groups, where there is one."""
        if self.relative is None:
            return {}
        assert memory.positions is not None
        lead = memory.positions.shape[:-1]
        places = jnp.broadcast_to(places, (*lead, places.shape[-1]))
        return {"bias": self.relative(places, memory.positions)}


def _padded(x: Array, before: int, after: int) -> Array:
    """Pads the axis of queries, the one before the last, with zeros."""
    widths: Sequence[tuple[int, int]] = [(0, 0)] * (x.ndim - 2) + [(before, after), (0, 0)]
    return jnp.pad(x, widths)


def _pair(result: Any) -> tuple:
    return result if isinstance(result, tuple) else (result, None)
