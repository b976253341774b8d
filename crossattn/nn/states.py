"""Decoding states of a decoder with caches, for all sequences of a row at once.

A layer with self-attention has a cache, and each layer the memories that it reads. Caches are never moved:
the sequences of a row share one cache, a table maps each sequence to the slots that it reads, and a row goes
back by a smaller number of positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.nn.blocks import BlockState
from crossattn.nn.edits import hand_out, row_of, with_handed_out
from crossattn.ops.exporting import exportable
from crossattn.ops.integers import as_int32
from crossattn.ops.memory import Memory
from crossattn.types import AnyArray, Array, Bool, Int, Shaped


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedStates:
    """Keys and values of the tokens of J sequences a row: the states of ``prefill`` and ``decode_step``.

    Attributes:
      layers: one state a layer, of scanned layers too; their caches have no length and no positions.
      positions: number of positions in all caches, []; or [B] for rows that differ in it.
      ancestors: [B J X], the sequence whose slot each one reads at each of X positions; None for J = 1.
      padding: number of padding positions at the beginning of each row, [B]; None is 0.
      context: arrays [B ...] that a model needs of each row, such as its images and their positions.
      watched: the sublayers whose memory is the source, of ``source_valid``; () is all.
    """

    layers: tuple[BlockState, ...]
    positions: Int[AnyArray, "#B"] | Int[AnyArray, ""]
    ancestors: Int[AnyArray, "B J X"] | None = None
    padding: Int[AnyArray, " B"] | None = None
    context: Any = None
    watched: tuple[str, ...] = field(default=(), metadata={"static": True})

    @classmethod
    def empty(
        cls,
        layers: tuple[BlockState, ...],
        batch: int,
        num_beams: int,
        cache_length: int,
        context: Any = None,
    ) -> "CachedStates":
        """Makes states at position 0; ``layers`` have caches of ``cache_length * num_beams`` slots."""
        table = None
        if num_beams > 1:
            own = jnp.arange(num_beams, dtype=jnp.int32)[:, None]
            table = jnp.broadcast_to(own, (batch, num_beams, cache_length))
        layers = tuple(map(_without_length, layers))
        return cls(layers, jnp.zeros((), jnp.int32), table, context=context)

    def select(self, parents: Int[Array, "B J"]) -> "CachedStates":
        """Lets sequence j of a row continue sequence ``parents[:, j]``."""
        if self.ancestors is None:
            return self
        taken = jnp.take_along_axis(self.ancestors, parents[..., None], axis=1)
        return replace(self, ancestors=_own_from(taken, self.positions))

    def rewind(self, lengths: Int[Array, " B"]) -> "CachedStates":
        """Goes back to the first ``lengths`` positions of each row; later slots will be overwritten."""
        lengths = as_int32("lengths", lengths)
        table = None if self.ancestors is None else _own_from(self.ancestors, lengths)
        return replace(self, positions=lengths, ancestors=table)

    def pad_left(self, padding: Int[Array, " B"]) -> "CachedStates":
        """Marks the first ``padding`` positions of each row as padding; for states at position 0."""
        return replace(self, padding=as_int32("padding", padding))

    def with_memories(
        self, layers: tuple[BlockState, ...], chunk: Int[AnyArray, "#B"] | Any = None
    ) -> "CachedStates":
        """Returns states that read the memories of other layer states; see ``DecoderStack.reread``.

        Raises:
          ValueError: a memory of chunks does not fit into the one that it is written to.
        """
        pairs = zip(self.layers, layers, strict=True)
        return replace(self, layers=tuple(_with_memories(*pair, chunk) for pair in pairs))

    @property
    def source_valid(self) -> Bool[Array, "B S"] | None:
        """The padding mask of the source; None without memories but those of chunks."""
        read = (
            memory
            for state in self.layers
            for name, memory in state.memories.items()
            if memory.keys.ndim == 4 and (not self.watched or name in self.watched)
        )
        return next((memory.readable for memory in read), None)

    @property
    def cache_length(self) -> int:
        """The number of positions of the caches, X; 0 without caches."""
        if self.ancestors is not None:
            return self.ancestors.shape[-1]
        return next((s.cache.size for s in self.layers if s.cache is not None), 0)

    def token_positions(self, count: int) -> Int[Array, "*B T"]:
        """Returns the positions of the next ``count`` tokens in their row's text, [T] or [B 1 T]."""
        positions = jnp.asarray(self.positions) + jnp.arange(count)
        if self.padding is None:
            return positions
        return jnp.maximum(positions - self.padding[:, None, None], 0)

    def growing(self) -> tuple[BlockState, ...]:
        """Returns the layers with the length of their caches."""
        J = 1 if self.ancestors is None else self.ancestors.shape[-2]

        def grow(state: BlockState) -> BlockState:
            if state.cache is None:
                return state
            return replace(
                state, cache=replace(state.cache, length=jnp.asarray(self.positions) * J)
            )

        return tuple(map(grow, self.layers))

    def grown(self, layers: tuple[BlockState, ...], count: int) -> "CachedStates":
        """Returns the states after ``count`` further positions, which ``layers`` have written."""
        layers = tuple(map(_without_length, layers))
        return replace(self, layers=layers, positions=self.positions + count)


def by_row(
    decode: Callable[..., tuple], tokens: Shaped[Array, "B J T *F"], states: CachedStates
) -> Any:
    """Maps ``decode(tokens, states) -> (x, states, weights)`` over rows that differ in their position."""
    rows, watched = jnp.arange(len(tokens)), states.watched

    def one(row: Array, tokens: Array, fields: dict[str, Any]) -> tuple:
        own = CachedStates(**_rows(jnp.expand_dims, fields), watched=watched)
        with row_of(row, len(rows)):
            (x, own, weights), found = with_handed_out(decode)(tokens[None], own)
        found = jax.tree.map(lambda a: a[:, 0], found)
        weights = None if weights is None else weights[:, 0]
        return x[0], _rows(jnp.squeeze, _arrays(own)), weights, found

    given = rows, tokens, _arrays(states)
    x, fields, weights, found = jax.vmap(one, out_axes=(0, 0, 1, 1))(*given)
    hand_out(found)
    return x, CachedStates(**fields, watched=watched), weights


def _arrays(states: CachedStates) -> dict[str, Any]:
    return {name: x for name, x in vars(states).items() if name != "watched"}


def check_rows(name: str, x: AnyArray, batch: int) -> None:
    """Checks that an input has as many rows as are decoded.

    Raises:
      ValueError: the numbers differ.
    """
    if x.shape[0] != batch:
        raise ValueError(f"{name} has {x.shape[0]} rows; expected as many as the batch, {batch}.")


def _rows(change: Callable, fields: dict[str, Any]) -> dict[str, Any]:
    """Adds the batch axis to, or takes it from, all fields but the positions."""
    others = {name: x for name, x in fields.items() if name != "positions"}
    return fields | jax.tree.map(lambda x: change(x, 0), others)


def _own_from(
    table: Int[AnyArray, "B J X"], positions: Int[AnyArray, "..."]
) -> Int[Array, "B J X"]:
    """Maps each sequence to its own slots from ``positions`` on."""
    J, X = table.shape[-2:]
    own = jnp.arange(J, dtype=table.dtype)[:, None]
    return jnp.where(jnp.arange(X) >= positions[..., None, None], own, table)


def _with_memories(state: BlockState, read: BlockState, chunk: Any) -> BlockState:
    new = read.memories
    if chunk is not None:
        new = {name: _written(name, state.memories.get(name), x, chunk) for name, x in new.items()}
    return replace(state, memories=state.memories | new)


def _written(name: str, slots: Memory | None, new: Memory, chunk: Any) -> Memory:
    """Writes a memory of chunks [B c S] into one of more chunks [B C S], from ``chunk`` on."""
    shape = None if slots is None else slots.keys.shape
    own = new.keys.shape
    if shape is None or len(shape) < 5 or own[:1] + own[2:] != shape[:1] + shape[2:]:
        has = "nothing" if shape is None else f"keys of shape {shape}"
        raise ValueError(
            f"the memory for {name} has keys of shape {own}, and the states {has}; expected chunks "
            "[B C S K H] in both, alike but for C: give Encoded.empty to prefill."
        )
    B, count = own[:2]
    if not isinstance(chunk, jax.core.Tracer) and np.any(np.asarray(chunk) + count > shape[1]):
        raise ValueError(
            f"chunk is {chunk}, and {count} are written; expected them among the {shape[1]} of the states."
        )
    places = jnp.broadcast_to(jnp.asarray(chunk)[..., None] + jnp.arange(count), (B, count))

    def write(old: Any, x: Any) -> Any:
        return old.at[jnp.arange(B)[:, None], places].set(x.astype(old.dtype), mode="drop")

    masked = slots.valid is not None or new.valid is not None
    return Memory(
        write(slots.keys, new.keys),
        write(slots.values, new.values),
        write(slots.readable, new.readable) if masked else None,
        None if slots.positions is None else write(slots.positions, new.positions),
    )


def _without_length(state: BlockState) -> BlockState:
    cache = None if state.cache is None else replace(state.cache, length=None, positions=None)
    return replace(state, cache=cache, captured={})
