"""From tokens to the vectors that enter a stack, under any position scheme."""

from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from crossattn.nn.layers import Embedding
from crossattn.nn.positions import LearnedPositions, RelativeBias
from crossattn.ops import bias
from crossattn.ops.dropout import dropout
from crossattn.ops.positions import sinusoidal
from crossattn.types import Array, Float, Int, Key

PositionScheme = Literal["sinusoidal", "learned", "rope", "relative", "alibi", "none"]
_SCHEMES = ("sinusoidal", "learned", "rope", "relative", "alibi", "none")


class TokenInput(nnx.Module):
    """Token embeddings, plus position vectors where the scheme adds them.

    Args:
      vocab_size: V.
      dim: D.
      positions: the scheme; "rope", "relative" and "alibi" act inside attention and add nothing here.
      max_length: number of positions of the "learned" scheme.
      dropout_rate: on the sum.
      dtype: computation dtype.

    Raises:
      ValueError: the scheme is unknown.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        positions: PositionScheme,
        max_length: int,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        if positions not in _SCHEMES:
            raise ValueError(f"positions is {positions!r}; expected one of {', '.join(_SCHEMES)}.")
        self.embedding = Embedding(vocab_size, dim, dtype=dtype, rngs=rngs)
        learned = positions == "learned"
        self.learned = LearnedPositions(max_length, dim, rngs=rngs) if learned else None
        self.sinusoids = positions == "sinusoidal"
        self.dropout_rate = dropout_rate

    def __call__(
        self,
        tokens: Int[Array, "*B T"],
        positions: Int[Array, "*#B T"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B T D"]:
        """Vectors [*B T D]; positions default to ``arange``; a key turns dropout on."""
        x = self.embedding(tokens)
        if positions is None:
            positions = jnp.arange(tokens.shape[-1])
        if self.sinusoids:
            x = x + sinusoidal(positions, x.shape[-1]).astype(x.dtype)
        if self.learned is not None:
            x = x + self.learned(positions).astype(x.dtype)
        return dropout(x, self.dropout_rate, key)


class PositionBias(nnx.Module):
    """The bias that a stack's self-attention layers share: T5's learnt one, or ALiBi's fixed one."""

    def __init__(
        self, positions: PositionScheme, num_heads: int, *, bidirectional: bool, rngs: nnx.Rngs
    ):
        learned = positions == "relative"
        self.relative = (
            RelativeBias(num_heads, bidirectional=bidirectional, rngs=rngs) if learned else None
        )
        self.alibi_heads = num_heads if positions == "alibi" else 0

    def __call__(
        self, q_positions: Int[Array, "*B T"], k_positions: Int[Array, "*B S"]
    ) -> Float[Array, "*B N T S"] | None:
        """The bias, or None when the scheme has none."""
        if self.relative is not None:
            return self.relative(q_positions, k_positions)
        if self.alibi_heads:
            return bias.alibi(q_positions, k_positions, self.alibi_heads)
        return None
