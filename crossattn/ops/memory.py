"""Memory: what a query reads. Keys and values, which of them may be read, and where they stand.

Encoder states, a KV cache, latents, retrieved neighbours: all are one value of this type. Nothing
here mutates; ``append`` returns a new memory of the same static size, so it lives in a ``while_loop``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops import masks
from crossattn.ops.exporting import exportable
from crossattn.ops.promotion import as_written
from crossattn.types import AnyArray, Array, Bool, Int, Shaped


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """Projected keys and values.

    Attributes:
      keys: [*B S K H].
      values: [*B S K Hv].
      valid: [*B S], True where a slot may be read; None means everywhere, in a cache every filled slot.
      positions: [*B S], where each slot stands in its sequence; None means ``arange``.
      length: how many slots a cache has filled, []; None for a memory that does not grow.
    """

    keys: Shaped[AnyArray, "*B S K H"]
    values: Shaped[AnyArray, "*B S K Hv"]
    valid: Bool[AnyArray, "*B S"] | None = None
    positions: Int[AnyArray, "*B S"] | None = None
    length: Int[AnyArray, "..."] | None = None

    @classmethod
    def empty(
        cls,
        batch_shape: Sequence[int],
        size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype=jnp.float32,
        bare: bool = False,
    ) -> "Memory":
        """Returns a cache of ``size`` free slots, for ``append``.

        A ``bare`` one has no ``valid`` and no ``positions``, and so is cheaper to grow: every slot
        that is filled may be read, and stands where it lies.
        """
        lead = (*batch_shape, size)
        return cls(
            keys=jnp.zeros((*lead, num_kv_heads, head_dim), dtype),
            values=jnp.zeros((*lead, num_kv_heads, value_dim or head_dim), dtype),
            valid=None if bare else jnp.zeros(lead, bool),
            positions=None if bare else jnp.zeros(lead, jnp.int32),
            length=jnp.zeros((), jnp.int32),
        )

    @classmethod
    def concat(cls, *memories: "Memory") -> "Memory":
        """Returns one memory that holds the slots of all of them, in order.

        Parts without positions are numbered by where they land; the result does not grow.
        """
        if not memories:
            raise ValueError("Memory.concat: got no memory; expected at least one.")
        for memory in memories[1:]:
            _check_alike("concat", memory.keys, memory.values, memories[0])
        start, positions, valid = 0, [], []
        for memory in memories:
            own = jnp.arange(start, start + memory.size)
            own = own if memory.positions is None else memory.positions
            # Split over a mesh as the keys are.
            positions.append(jnp.zeros_like(memory.keys[..., 0, 0], jnp.int32) + own)
            valid.append(memory.readable)
            start += memory.size
        return cls(
            keys=jnp.concatenate([m.keys for m in memories], axis=-3),
            values=jnp.concatenate([m.values for m in memories], axis=-3),
            valid=(
                None
                if all(m.valid is None and m.length is None for m in memories)
                else jnp.concatenate(valid, -1)
            ),
            positions=(
                None
                if all(m.positions is None for m in memories)
                else jnp.concatenate(positions, axis=-1)
            ),
        )

    @property
    @as_written
    def readable(self) -> Bool[Array, "*B S"]:
        """Slots that may be read."""
        if self.valid is not None:
            return jnp.broadcast_to(self.valid, self.keys.shape[:-2])
        if self.length is None:
            return jnp.ones_like(self.keys[..., 0, 0], bool)
        filled = jnp.asarray(self.length)[..., None]
        return jnp.broadcast_to(jnp.arange(self.size) < filled, self.keys.shape[:-2])

    @property
    def size(self) -> int:
        """Number of slots S, filled or not."""
        return self.keys.shape[-3]

    @as_written
    def append(
        self,
        keys: Shaped[AnyArray, "*B X K H"],
        values: Shaped[AnyArray, "*B X K Hv"],
        valid: Bool[AnyArray, "*B X"] | None = None,
        positions: Int[AnyArray, "*#B X"] | None = None,
    ) -> "Memory":
        """Writes new slots after the filled ones; nothing moves.

        Their positions are their places in the memory where none are given. Where a program is traced that
        does not know how many are filled, what no longer fits is dropped, and what then reads the memory
        goes on without it: make it as large as the whole will be.

        Raises:
          ValueError: the memory is not a cache, or keeps no ``valid`` or ``positions`` where they are
            given, or more slots are added than are known to be free.
        """
        if self.length is None:
            raise ValueError(
                "Memory.append: this memory has no length, so it does not grow; start from "
                "Memory.empty, or use Memory.concat."
            )
        for name, given, own in (
            ("valid", valid, self.valid),
            ("positions", positions, self.positions),
        ):
            if given is not None and own is None:
                raise ValueError(
                    f"Memory.append: this memory keeps no {name}; start from Memory.empty without bare."
                )
        _check_alike("append", keys, values, self)
        added = keys.shape[-3]
        traced = isinstance(self.length, jax.core.Tracer)
        filled = 0 if traced else int(np.max(self.length))
        if filled + added > self.size:
            raise ValueError(
                f"Memory.append: {added} slots do not fit in a memory of size {self.size}, of which {filled} "
                "are filled; make it larger with Memory.empty."
            )
        lead = keys.shape[:-2]
        new_valid = jnp.ones(lead, bool) if valid is None else valid
        slots = self.length + jnp.arange(added)
        new_positions = slots if positions is None else positions

        def write(old: AnyArray | None, new: AnyArray, axis: int) -> Array | None:
            if old is None:
                return None
            # A scatter, because XLA would fuse a dynamic_update_slice into everything that reads the
            # result, keep the old buffer alive for it, and so copy the whole cache at every step. That is so
            # on CPU; the compilers for TPU and GPU write in place either way.
            index = (Ellipsis, slots, *(slice(None),) * (-axis - 1))
            return old.at[index].set(new.astype(old.dtype), mode="drop")

        return replace(
            self,
            keys=write(self.keys, keys, -3),
            values=write(self.values, values, -3),
            valid=write(self.valid, new_valid, -1),
            positions=write(self.positions, jnp.broadcast_to(new_positions, lead), -1),
            length=jnp.minimum(self.length + added, self.size),
        )

    def mask(self) -> masks.Mask:
        """Returns the mask of readable slots; combine with ``&``."""
        if self.valid is not None:
            return masks.key_padding(self.valid)
        return masks.Mask(()) if self.length is None else masks.lengths(self.length)


def _check_alike(method: str, keys: AnyArray, values: AnyArray, memory: Memory) -> None:
    """Checks that new keys and values have the memory's batch axes, heads and head sizes."""
    wanted = {"keys": memory.keys.shape, "values": memory.values.shape}
    for name, x in (("keys", keys), ("values", values)):
        shape = wanted[name]
        if x.shape[:-3] != shape[:-3] or x.shape[-2:] != shape[-2:]:
            raise ValueError(
                f"Memory.{method}: {name} have shape {x.shape}; expected {shape} with any length in "
                "place of the third axis from the end."
            )
    if keys.shape[-3] != values.shape[-3]:
        raise ValueError(
            f"Memory.{method}: keys have length {keys.shape[-3]} and values {values.shape[-3]}; "
            "expected the same."
        )
