"""Decoding states of a decoder with caches: what was read so far, for all sequences of a row at once.

A layer has a cache where it has self-attention, and the memories that it reads. Nothing large is ever
moved: the sequences of a row share one cache, and which of them reads whose slots is a table; to go back, a
row only says how many positions count.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.nn.blocks import BlockState
from crossattn.ops.exporting import exportable
from crossattn.ops.integers import as_int32
from crossattn.types import AnyArray, Array, Bool, Int


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedStates:
    """Keys and values of what J sequences a row have read; what ``prefill`` gives and ``decode_step`` takes.

    Attributes:
      layers: one state a layer, of scanned layers too. Caches have no length and no positions of their own:
        ``positions`` is that of all.
      positions: how many positions are read, []; or [B] where rows stand at positions of their own.
      ancestors: [B J X], whose slot each sequence reads at each of X positions; None where J is 1.
      padding: how many positions at the beginning of each row are not read, [B]; None is 0.
      context: what else a model knows of each row, arrays [B ...]: its images and where they stand, for one.
    """

    layers: tuple[BlockState, ...]
    positions: Int[AnyArray, "#B"] | Int[AnyArray, ""]
    ancestors: Int[AnyArray, "B J X"] | None = None
    padding: Int[AnyArray, " B"] | None = None
    context: Any = None

    @classmethod
    def empty(
        cls,
        layers: tuple[BlockState, ...],
        batch: int,
        num_beams: int,
        cache_length: int,
        context: Any = None,
    ) -> "CachedStates":
        """Nothing read yet; ``layers`` have caches of ``cache_length * num_beams`` slots, or none."""
        table = None
        if num_beams > 1:
            own = jnp.arange(num_beams, dtype=jnp.int32)[:, None]
            table = jnp.broadcast_to(own, (batch, num_beams, cache_length))
        layers = tuple(map(_without_length, layers))
        return cls(layers, jnp.zeros((), jnp.int32), table, context=context)

    def select(self, parents: Int[Array, "B J"]) -> "CachedStates":
        """Sequence j of a row goes on from what ``parents[:, j]`` has read."""
        if self.ancestors is None:
            return self
        taken = jnp.take_along_axis(self.ancestors, parents[..., None], axis=1)
        return replace(self, ancestors=_own_from(taken, self.positions))

    def rewind(self, lengths: Int[Array, " B"]) -> "CachedStates":
        """Only the first ``lengths`` positions of each row are read; what follows is written over."""
        lengths = as_int32("lengths", lengths)
        table = None if self.ancestors is None else _own_from(self.ancestors, lengths)
        return replace(self, positions=lengths, ancestors=table)

    def pad_left(self, padding: Int[Array, " B"]) -> "CachedStates":
        """States that have read nothing: the first ``padding`` positions of each row will not be read."""
        return replace(self, padding=as_int32("padding", padding))

    @property
    def source_valid(self) -> Bool[Array, "B S"] | None:
        """Which places may be read of what the first sublayer with a memory reads; None where none is."""
        read = next((m for state in self.layers for m in state.memories.values()), None)
        return None if read is None else read.readable

    @property
    def cache_length(self) -> int:
        """Positions that the caches have slots for, X; 0 where no layer has a cache."""
        if self.ancestors is not None:
            return self.ancestors.shape[-1]
        return next((s.cache.size for s in self.layers if s.cache is not None), 0)

    def token_positions(self, count: int) -> Int[Array, "*B T"]:
        """Where the next ``count`` tokens stand, each in its own row's text, [T] or [B 1 T]."""
        positions = jnp.asarray(self.positions) + jnp.arange(count)
        if self.padding is None:
            return positions
        return jnp.maximum(positions - self.padding[:, None, None], 0)

    def growing(self) -> tuple[BlockState, ...]:
        """The layers with caches that know how many of their slots are filled."""
        J = 1 if self.ancestors is None else self.ancestors.shape[-2]

        def grow(state: BlockState) -> BlockState:
            if state.cache is None:
                return state
            return replace(
                state, cache=replace(state.cache, length=jnp.asarray(self.positions) * J)
            )

        return tuple(map(grow, self.layers))

    def grown(self, layers: tuple[BlockState, ...], count: int) -> "CachedStates":
        """After ``count`` positions more, which ``layers`` have written."""
        layers = tuple(map(_without_length, layers))
        return replace(self, layers=layers, positions=self.positions + count)


def by_row(decode: Callable[..., tuple], tokens: Int[Array, "B J T"], states: CachedStates) -> Any:
    """``decode(tokens, states) -> (x, states, weights)`` where each row stands at a position of its own.

    It is mapped over rows, so products with the weights stay whole.
    """

    def one(tokens: Array, fields: dict[str, Any]) -> tuple:
        own = CachedStates(**_rows(jnp.expand_dims, fields))
        x, own, weights = decode(tokens[None], own)
        weights = None if weights is None else weights[:, 0]
        return x[0], _rows(jnp.squeeze, vars(own)), weights

    x, fields, weights = jax.vmap(one, out_axes=(0, 0, 1))(tokens, vars(states))
    return x, CachedStates(**fields), weights


def check_rows(name: str, x: AnyArray, batch: int) -> None:
    """Whether what is read has as many rows as are decoded.

    Raises:
      ValueError: it has not.
    """
    if x.shape[0] != batch:
        raise ValueError(f"{name} has {x.shape[0]} rows; expected as many as the batch, {batch}.")


def _rows(change: Callable, fields: dict[str, Any]) -> dict[str, Any]:
    """The batch axis added to or taken from all fields but the positions."""
    others = {name: x for name, x in fields.items() if name != "positions"}
    return fields | jax.tree.map(lambda x: change(x, 0), others)


def _own_from(
    table: Int[AnyArray, "B J X"], positions: Int[AnyArray, "..."]
) -> Int[Array, "B J X"]:
    """From ``positions`` on, each sequence reads what it will write itself."""
    J, X = table.shape[-2:]
    own = jnp.arange(J, dtype=table.dtype)[:, None]
    return jnp.where(jnp.arange(X) >= positions[..., None, None], own, table)


def _without_length(state: BlockState) -> BlockState:
    cache = None if state.cache is None else replace(state.cache, length=None, positions=None)
    return replace(state, cache=cache, captured={})


__all__ = ["CachedStates", "by_row", "check_rows"]
