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
      max_positions: how many.
      dim: D.
      offset: rows of the table before that of position 0, which BART and its kin leave unused.
      std: of the vectors at first.

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
        """How many positions there are."""
        return self.table.shape[0] - self.offset

    def check(self, length: int) -> None:
        """Whether a sequence that begins at position 0 fits.

        Raises:
          ValueError: it does not.
        """
        if length > self.count:
            raise ValueError(
                f"a sequence of {length} tokens was asked for, but this model has learned "
                f"{self.count} positions: shorten the text or its prefix, or generate fewer tokens."
            )

    @on_any_mesh
    def __call__(self, positions: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Vectors of the positions; those past the table are NaN rather than silently wrong."""
        rows = as_int32("positions", positions) + self.offset
        return self.table[...].at[rows].get(mode="fill", fill_value=jax.numpy.nan)


class RelativeBias(nnx.Module):
    """A learnt bias for each head and bucket of distance, shared by the layers of a stack.

    Raises:
      ValueError: ``max_distance`` leaves nothing for buckets of several distances.
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
        """The bias to give to ``attend``."""
        table = self.table[...]
        buckets = bias.relative_buckets(
            q_positions, k_positions, table.shape[0], self.max_distance, self.bidirectional
        )
        return bias.relative_bias(table, buckets)
