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
from crossattn.types import AnyArray, Array, Bool, Int


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedStates:
    """Keys and values of what J sequences a row have read; what ``prefill`` gives and ``decode_step`` takes.

    Attributes:
      layers: a tuple of ``BlockState``, one a layer; or, scanned, one with a leading axis L, a list of them
        where a period has several blocks. Caches have no length of their own: ``positions`` is that of all.
      positions: how many positions are read, []; or [B] where rows stand at positions of their own.
      ancestors: [B J X], whose slot each sequence reads at each of X positions; None where J is 1.
      padding: how many positions at the beginning of each row are not read, [B]; None is 0.
      context: what else a model knows of each row, arrays [B ...]: its images and where they stand, for one.
    """

    layers: Any
    positions: Int[AnyArray, "#B"] | Int[AnyArray, ""]
    ancestors: Int[AnyArray, "B J X"] | None = None
    padding: Int[AnyArray, " B"] | None = None
    context: Any = None

    @classmethod
    def empty(
        cls, layers: Any, batch: int, num_beams: int, cache_length: int, context: Any = None
    ) -> "CachedStates":
        """Nothing read yet; ``layers`` have caches of ``cache_length * num_beams`` slots, or none."""
        table = None
        if num_beams > 1:
            own = jnp.arange(num_beams, dtype=jnp.int32)[:, None]
            table = jnp.broadcast_to(own, (batch, num_beams, cache_length))
        layers = _map_layers(_without_length, layers)
        return cls(layers, jnp.zeros((), jnp.int32), table, context=context)

    def select(self, parents: Int[Array, "B J"]) -> "CachedStates":
        """Sequence j of a row goes on from what ``parents[:, j]`` has read."""
        if self.ancestors is None:
            return self
        taken = jnp.take_along_axis(self.ancestors, parents[..., None], axis=1)
        return replace(self, ancestors=_own_from(taken, self.positions))

    def rewind(self, lengths: Int[Array, " B"]) -> "CachedStates":
        """Only the first ``lengths`` positions of each row are read; what follows is written over."""
        table = None if self.ancestors is None else _own_from(self.ancestors, lengths)
        return replace(self, positions=lengths, ancestors=table)

    def pad_left(self, padding: Int[Array, " B"]) -> "CachedStates":
        """States that have read nothing: the first ``padding`` positions of each row will not be read."""
        return replace(self, padding=padding)

    @property
    def source_valid(self) -> Bool[Array, "B S"] | None:
        """Which places may be read of what the first sublayer with a memory reads; None where none is."""
        read = next((m for state in self._period for m in state.memories.values()), None)
        if read is None or isinstance(self.layers, tuple):
            return None if read is None else read.readable
        return jax.tree.map(lambda x: x[0], read).readable

    @property
    def cache_length(self) -> int:
        """Positions that the caches have slots for, X; 0 where no layer has a cache."""
        if self.ancestors is not None:
            return self.ancestors.shape[-1]
        return next((s.cache.size for s in self._period if s.cache is not None), 0)

    @property
    def _period(self) -> Any:
        """The states of layers, at least of one of each kind."""
        return self.layers if isinstance(self.layers, tuple | list) else [self.layers]

    def token_positions(self, count: int) -> Int[Array, "*B T"]:
        """Where the next ``count`` tokens stand, each in its own row's text, [T] or [B 1 T]."""
        positions = jnp.asarray(self.positions) + jnp.arange(count)
        if self.padding is None:
            return positions
        return jnp.maximum(positions - self.padding[:, None, None], 0)

    def growing(self) -> Any:
        """The layers with caches that know how many of their slots are filled."""
        J = 1 if self.ancestors is None else self.ancestors.shape[-2]

        def grow(state: BlockState) -> BlockState:
            if state.cache is None:
                return state
            length = jnp.broadcast_to(self.positions * J, state.cache.keys.shape[:-4])
            return replace(state, cache=replace(state.cache, length=length))

        return _map_layers(grow, self.layers)

    def grown(self, layers: Any, count: int) -> "CachedStates":
        """After ``count`` positions more, which ``layers`` have written."""
        return replace(
            self, layers=_map_layers(_without_length, layers), positions=self.positions + count
        )


def by_row(decode: Callable[..., tuple], tokens: Int[Array, "B J T"], states: CachedStates) -> Any:
    """``decode(tokens, states) -> (x, states, weights)`` where each row stands at a position of its own.

    It is mapped over rows, so products with the weights stay whole.
    """
    axis = 0 if isinstance(states.layers, tuple) else 1
    axes = {"layers": axis, "positions": 0, "ancestors": 0, "padding": 0, "context": 0}

    def one(tokens: Array, fields: dict[str, Any]) -> tuple:
        own = CachedStates(**_rows(jnp.expand_dims, fields, axis))
        x, own, weights = decode(tokens[None], own)
        weights = None if weights is None else weights[:, 0]
        return x[0], _rows(jnp.squeeze, vars(own), axis), weights

    run = jax.vmap(one, in_axes=(0, axes), out_axes=(0, axes, 1))
    x, fields, weights = run(tokens, vars(states))
    return x, CachedStates(**fields), weights


def check_rows(name: str, x: AnyArray, batch: int) -> None:
    """Whether what is read has as many rows as are decoded.

    Raises:
      ValueError: it has not.
    """
    if x.shape[0] != batch:
        raise ValueError(f"{name} has {x.shape[0]} rows; expected as many as the batch, {batch}.")


def _rows(change: Callable, fields: dict[str, Any], axis: int) -> dict[str, Any]:
    """The batch axis added to or taken from all fields but the positions."""
    axes = {"layers": axis, "ancestors": 0, "padding": 0, "context": 0}
    changed = {
        name: jax.tree.map(lambda x, at=at: change(x, at), fields[name])
        for name, at in axes.items()
    }
    return fields | changed


def _own_from(
    table: Int[AnyArray, "B J X"], positions: Int[AnyArray, "..."]
) -> Int[Array, "B J X"]:
    """From ``positions`` on, each sequence reads what it will write itself."""
    J, X = table.shape[-2:]
    own = jnp.arange(J, dtype=table.dtype)[:, None]
    return jnp.where(jnp.arange(X) >= positions[..., None, None], own, table)


def _without_length(state: BlockState) -> BlockState:
    cache = None if state.cache is None else replace(state.cache, length=None)
    return replace(state, cache=cache, weights=None)


def _map_layers(change: Callable[[BlockState], BlockState], layers: Any) -> Any:
    """``change`` of each layer's state; of the stacked ones of scanned layers."""
    if isinstance(layers, tuple | list):
        return type(layers)(map(change, layers))
    return change(layers)


__all__ = ["CachedStates", "by_row", "check_rows"]
