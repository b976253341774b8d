"""Learnt position schemes: a table of vectors, and T5's table of biases."""

import jax
from flax import nnx

from crossattn.nn.meshes import on_any_mesh
from crossattn.ops.integers import as_int32
from crossattn.ops.positions import bias
from crossattn.types import Array, Float, Int


class LearnedPositions(nnx.Module):
    """One vector a position, up to a fixed number of positions.

    Args:
      max_positions: number of positions.
      dim: D.
      offset: unused rows of the table before that of position 0, as in BART.
      std: standard deviation of the vectors at initialisation.

    Source: Gehring et al. 2017, section 3.1.
    """

    def __init__(
        self, max_positions: int, dim: int, *, offset: int = 0, std: float = 0.02, rngs: nnx.Rngs
    ):
        table = jax.random.normal(rngs.params(), (max_positions + offset, dim)) * std
        self.table: nnx.Variable = nnx.Param(table, axes=(None, "embed"))
        self.offset = offset

    @property
    def count(self) -> int:
        """The number of positions."""
        return self.table.shape[0] - self.offset

    def check(self, length: int) -> None:
        """Checks that a sequence that begins at position 0 fits.

        Raises:
          ValueError: the sequence is too long.
        """
        if length > self.count:
            raise ValueError(
                f"a sequence of {length} tokens was asked for, but this model has learned "
                f"{self.count} positions: shorten the text or its prefix, or generate fewer tokens."
            )

    @on_any_mesh
    def __call__(self, positions: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Looks vectors up; positions past the table give NaN."""
        rows = as_int32("positions", positions) + self.offset
        return self.table[...].at[rows].get(mode="fill", fill_value=jax.numpy.nan)


class RelativeBias(nnx.Module):
    """A learnt bias for each head and bucket of distance, shared by the layers of a stack.

    Raises:
      ValueError: ``max_distance`` leaves no bucket for several distances.
    Source: Raffel et al. 2020, section 2.1.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        *,
        bidirectional: bool,
        rngs: nnx.Rngs,
    ):
        bias.check_buckets(num_buckets, max_distance, bidirectional)
        table = jax.random.normal(rngs.params(), (num_buckets, num_heads)) * 0.02
        self.table = nnx.Param(table, axes=(None, "heads"))
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    @on_any_mesh
    def __call__(
        self, q_positions: Int[Array, "*B T"], k_positions: Int[Array, "*B S"]
    ) -> Float[Array, "*B N T S"]:
        """Computes the bias of ``attend``."""
        table = self.table[...]
        buckets = bias.relative_buckets(
            q_positions, k_positions, table.shape[0], self.max_distance, self.bidirectional
        )
        return bias.relative_bias(table, buckets)
