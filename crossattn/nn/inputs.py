"""Token embeddings and positions: the input of a stack, under any position scheme."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.axes import placed
from crossattn.nn.layers import Embedding, check_ids, norm
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.positions import LearnedPositions, RelativeBias
from crossattn.ops.dropout import dropout
from crossattn.ops.positions import bias
from crossattn.ops.positions.sinusoids import sinusoid_table, sinusoidal
from crossattn.types import Array, Bool, Float, Int, Key, Rate, Shaped

PositionScheme = Literal["sinusoidal", "learned", "rope", "relative", "alibi", "none"]
_SCHEMES = get_args(PositionScheme)


@dataclass(frozen=True)
class InputConfig:
    """The options of ``TokenInput`` besides its position scheme.

    Attributes:
      scale: factor of the embeddings; None is ``dim ** 0.5``.
      token_types: number of token types, each with a vector of its own (BERT's segments A and B).
      position_offset: see ``LearnedPositions``.
      position_std: standard deviation of the "learned" positions at initialisation.
      norm_epsilon: of a layer norm over the sum; None is no norm.
      frozen_id: a token whose embedding gets no gradient from look-ups, the ``padding_idx`` of PyTorch; an
        output layer of the same table still trains it. None is none.
      sinusoids_from: fairseq's sinusoids with this padding token: wavelengths end at the last feature instead
        of after it, a text begins at the position after the token's id, and the token has none. None is the
        paper's.
      sinusoid_dtype: type of a table of sinusoids of ``max_length`` rows, as checkpoints of half precision
        have it; None computes them in float32, for any number of positions.
      dropout_rate: of the sum; None is that of the blocks.
    """

    scale: float | None = None
    token_types: int = 0
    position_offset: int = 0
    position_std: float = 0.02
    norm_epsilon: float | None = None
    frozen_id: int | None = None
    sinusoids_from: int | None = None
    sinusoid_dtype: str | None = None
    dropout_rate: Rate | None = None


def without_padding(
    tokens: Shaped[Array, "..."], segment_ids: Int[Array, "*B S"] | None, pad_id: int | None
) -> Int[Array, "*B S"] | None:
    """Returns the segments; None becomes 0 for ``pad_id`` and 1 elsewhere, if there is a ``pad_id``."""
    if segment_ids is not None or pad_id is None:
        return segment_ids
    return (tokens != pad_id).astype(jnp.int32)


class TokenInput(nnx.Module):
    """Token embeddings, plus position vectors where the scheme adds them.

    Args:
      vocab_size: V; None for an input whose calls pass ``embedding``.
      dim: D.
      positions: the scheme; "rope", "relative" and "alibi" act inside attention and add nothing here.
      max_length: number of positions of the "learned" scheme, and of a table of sinusoids, which need it.
      config: scale, norm and further summands.
      dropout_rate: of the sum, where the config says none.
      dtype: computation dtype.

    Raises:
      ValueError: the scheme is unknown, or wants a ``max_length``.
    """

    def __init__(
        self,
        vocab_size: int | None,
        dim: int,
        *,
        positions: PositionScheme,
        max_length: int | None = None,
        config: InputConfig = InputConfig(),
        dropout_rate: float = 0.0,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        _check(positions)
        learned, self.sinusoids = positions == "learned", positions == "sinusoidal"
        self.stored = config.sinusoid_dtype if self.sinusoids else None
        if max_length is None and (learned or self.stored is not None):
            what = "learnt positions" if learned else f"a table of sinusoids in {self.stored}"
            raise ValueError(f"max_length is None; {what} want their number.")
        types, epsilon = config.token_types, config.norm_epsilon
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.embedding: Any = (
            None
            if vocab_size is None
            else Embedding(vocab_size, dim, scale=config.scale, **options)
        )
        table: dict[str, Any] = dict(offset=config.position_offset, std=config.position_std)
        self.learned = (
            LearnedPositions(max_length or 0, dim, **table, rngs=rngs) if learned else None
        )
        # Kinds of token are looked up like positions: one vector each, none beyond the table.
        self.types = LearnedPositions(types, dim, rngs=rngs) if types else None
        self.norm = None if epsilon is None else norm("layer", dim, epsilon=epsilon, **options)
        self.sinusoids_from = config.sinusoids_from
        self.max_length = max_length or 0
        self.frozen_id = config.frozen_id
        self.dropout_rate = dropout_rate if config.dropout_rate is None else config.dropout_rate

    @property
    def longest(self) -> int | None:
        """The largest number of tokens that have positions; None is unlimited."""
        if self.stored is not None:
            return self.max_length
        return None if self.learned is None else self.learned.count

    def check(self, length: int) -> None:
        """Checks that so many tokens have positions.

        Raises:
          ValueError: the "learned" scheme, or a table of sinusoids, has fewer positions.
        """
        if self.stored is not None and length > self.max_length:
            raise ValueError(
                f"a sequence of {length} tokens was asked for, but this model's table has "
                f"{self.max_length} positions: shorten the text or its prefix, or generate fewer tokens."
            )
        if self.learned is not None:
            self.learned.check(length)

    @on_any_mesh
    def __call__(
        self,
        tokens: Int[Array, "*B T"],
        positions: Int[Array, "*#B T"] | None = None,
        key: Key[Array, ""] | None = None,
        *,
        types: Int[Array, "*#B T"] | None = None,
        embedding: Embedding | None = None,
        others: tuple[Bool[Array, "*#B T"], Float[Array, "*#B T D"]] | None = None,
    ) -> Float[Array, "*B T D"]:
        """Computes vectors [*B T D]; positions default to ``arange``, types to 0; a key turns dropout on.

        Args:
          tokens, positions, key, types: as above.
          embedding: for an input without a table of its own.
          others: a mask of places, and the vectors (of patches, for one) that replace the embeddings there;
            positions and types are added to them too.

        Raises:
          ValueError: as ``check`` does, without ``positions``; or a token or a type, outside of ``jax.jit``,
            is not in its table.
        """
        if others is not None:  # their placeholder may be a token outside the table
            tokens = jnp.where(others[0], 0, tokens)
        x = (self.embedding or embedding)(tokens)
        if self.frozen_id is not None:
            x = jnp.where((tokens == self.frozen_id)[..., None], jax.lax.stop_gradient(x), x)
        if others is not None:
            x = jnp.where(others[0][..., None], others[1].astype(x.dtype), x)
        if positions is None:
            self.check(tokens.shape[-1])
            positions = jnp.arange(tokens.shape[-1])
        if self.sinusoids:
            x = x + self._sinusoids(tokens, positions, x.shape[-1]).astype(x.dtype)
        if self.learned is not None:
            x = x + self.learned(positions).astype(x.dtype)
        if self.types is not None:
            kinds = jnp.zeros((), jnp.int32) if types is None else types
            check_ids(kinds, self.types.count, "types")
            x = x + self.types(kinds).astype(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return placed(dropout(x, self.dropout_rate, key), "embed")

    def _sinusoids(
        self, tokens: Int[Array, "*B T"], positions: Int[Array, "*#B T"], dim: int
    ) -> Float[Array, "*#B T D"]:
        if self.sinusoids_from is not None:
            longest = 10000.0 ** (dim / (dim - 2))  # so that the last feature's is 10000
            vectors = sinusoidal(positions + self.sinusoids_from + 1, dim, longest)
            return jnp.where((tokens == self.sinusoids_from)[..., None], 0, vectors)
        if self.stored is None:
            return sinusoidal(positions, dim)
        table = jnp.asarray(sinusoid_table(self.max_length, dim).astype(self.stored))
        return table.at[positions].get(mode="fill", fill_value=jnp.nan)


def _check(positions: str) -> None:
    if positions not in _SCHEMES:
        raise ValueError(f"positions is {positions!r}; expected one of {', '.join(_SCHEMES)}.")


class PositionBias(nnx.Module):
    """The bias that a stack's self-attention layers share: T5's learnt one, or ALiBi's fixed one.

    Other schemes have none.

    Raises:
      ValueError: there is no such scheme.
    """

    def __init__(
        self,
        positions: PositionScheme,
        num_heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool,
        rngs: nnx.Rngs,
    ):
        _check(positions)
        self.relative = (
            RelativeBias(num_heads, buckets, max_distance, bidirectional=bidirectional, rngs=rngs)
            if positions == "relative"
            else None
        )
        self.alibi_heads = num_heads if positions == "alibi" else 0

    def __call__(
        self, q_positions: Int[Array, "*B T"], k_positions: Int[Array, "*B S"]
    ) -> Float[Array, "*B N T S"] | None:
        """Computes the bias, or returns None for a scheme without one."""
        if self.relative is not None:
            return self.relative(q_positions, k_positions)
        if self.alibi_heads:
            return bias.alibi(q_positions, k_positions, self.alibi_heads)
        return None
