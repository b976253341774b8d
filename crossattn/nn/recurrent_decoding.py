"""The decoder of a recurrent model: cells, an attention before or after them, and decoding states."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.nn.encoded import Encoded
from crossattn.nn.layers import linear
from crossattn.nn.recurrent import Cell, RecurrentCell
from crossattn.ops.dropout import dropout
from crossattn.ops.exporting import exportable
from crossattn.ops.memory import Memory
from crossattn.types import AnyArray, Array, Bool, Float, Int, Key


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentStates:
    """States of J sequences a row. They cannot go back, so there is no ``rewind``.

    Attributes:
      layers: of each cell [B J L P D].
      fed: the attentional vectors [B J D], an input of the next step.
      memory: the encoded source [B S]; None without attention.
      position: number of tokens so far, [].
    """

    layers: Float[AnyArray, "B J L P D"]
    fed: Float[AnyArray, "B J D"]
    memory: Memory | None
    position: Int[AnyArray, ""]

    def select(self, parents: Int[Array, "B J"]) -> "RecurrentStates":
        """Lets sequence j of a row continue sequence ``parents[:, j]``."""

        def chosen(x: Any) -> Array:
            return jnp.take_along_axis(x, parents.reshape(*parents.shape, *[1] * (x.ndim - 2)), 1)

        return replace(self, layers=chosen(self.layers), fed=chosen(self.fed))

    @property
    def source_valid(self) -> Bool[Array, "B S"] | None:
        """The padding mask of the source; None without attention."""
        return None if self.memory is None else self.memory.readable


Carry = tuple[Float[Array, "*B L P D"], Float[Array, "*B D"]]
"""The state of each cell, and the attentional vector that is an input of the next step."""


class RecurrentDecoder(nnx.Module):
    """Cells over the target, of which the last one attends to a source.

        c_t = attend(s_(t-1));  s_t = cells([x_t; c_t]);  o_t = maxout(W [s_t; x_t; c_t] + b)    ``before``
        s_t = cells([x_t; o_(t-1)]);  c_t = attend(s_t);  o_t = tanh(W [c_t; s_t])               ``feeding``

    Without ``feeding`` the attentional vector o is no input; without attention o_t = s_t.

    Args:
      kind: of the cells, "gru" or "lstm".
      num_layers: L.
      dim: size of inputs and states, D.
      attention: a ``ScoredAttention``, or None.
      memory_dim: size of what it reads, M.
      before: it reads before the cells (Bahdanau et al. 2015) instead of after them (Luong et al. 2015).
      feeding: Luong's input feeding.
      dropout_rate: of the vectors between layers.
      dtype: computation dtype.
    """

    def __init__(
        self,
        kind: Cell,
        num_layers: int,
        dim: int,
        *,
        attention: Any = None,
        memory_dim: int,
        before: bool = False,
        feeding: bool = False,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        self.attention = attention
        self.before = before and attention is not None
        self.feeding = feeding and attention is not None and not before
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        more = memory_dim if self.before else dim if self.feeding else 0
        sizes = [dim + more] + [dim] * (num_layers - 1)
        self.cells = nnx.List([RecurrentCell(kind, size, dim, **options) for size in sizes])
        axes: dict[str, Any] = dict(in_axes=("embed",), out_axes=("mlp",), use_bias=before)
        size, out = dim + memory_dim, dim
        if self.before:  # maxout takes the larger number of each pair
            size, out, axes["out_axes"] = size + dim, (dim, 2), ("mlp", None)
        self.readout: Any = None if attention is None else linear(size, out, **axes, **options)
        self.dropout_rate = dropout_rate

    def read(self, encoded: Encoded) -> Memory | None:
        """Projects the source for all steps; None without attention."""
        if self.attention is None:
            return None
        return self.attention.memory(
            encoded.vectors, positions=encoded.positions, valid=encoded.valid
        )

    def start(self, layers: Float[Array, "*B L P D"]) -> Carry:
        """Returns the carry of these first states: them, and the vectors that are fed, 0."""
        return layers, jnp.zeros_like(layers[..., 0, 0, :])

    def prefill(
        self,
        encoded: Encoded,
        layers: Float[Array, "B _ L P D"],
        batch: int,
        num_beams: int,
    ) -> RecurrentStates:
        """Makes decoding states of J sequences a row that begin with these states, and have no length."""
        layers, fed = self.start(jnp.broadcast_to(layers, (batch, num_beams, *layers.shape[2:])))
        return RecurrentStates(layers, fed, self.read(encoded), jnp.zeros((), jnp.int32))

    def decode(
        self,
        embed: Any,
        tokens: Int[Array, "B J T"],
        states: RecurrentStates,
        *,
        memory_masks: Any = None,
        return_weights: bool = False,
    ) -> Any:
        """Runs the steps of the next T tokens: vectors [B J T D], the new states, and the weights on request.

        Args:
          embed: makes vectors of tokens, their positions and a context, which is None here.
          tokens: the next ones of each sequence.
          states: of ``prefill``, or of the last call.
          memory_masks: None; only ``DecoderStack`` has them.
          return_weights: return the weights [1 B J 1 T S] too.

        Raises:
          ValueError: as the call does, or ``memory_masks`` is given.
        """
        if memory_masks is not None:
            raise ValueError(
                "memory_masks was given, and a recurrent decoder has none; leave it out."
            )
        positions = jnp.asarray(states.position) + jnp.arange(tokens.shape[-1])
        x, (layers, fed), weights = self(
            embed(tokens, positions, None),
            (jnp.asarray(states.layers), jnp.asarray(states.fed)),
            states.memory,
            positions,
            return_weights=return_weights,
        )
        position = states.position + tokens.shape[-1]
        states = replace(states, layers=layers, fed=fed, position=position)
        return (x, states, weights) if return_weights else (x, states)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        carry: Carry,
        memory: Memory | None,
        positions: Int[Array, "*#B T"] | None = None,
        *,
        texts: tuple[Array, Array, Array] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T D"], Carry, Float[Array, "1 *B 1 T S"] | None]:
        """Runs the steps of T tokens: vectors, the last carry, and the weights or None.

        Args:
          x: embedded tokens.
          carry: of ``start``, or of the last call.
          memory: of ``read``.
          positions: of the tokens in their texts; None is ``arange``.
          texts: of packed rows, where texts start [*B T], the first states of each token's text
            [*B T L P D], and the part of the source that each token may read [*B T S].
          key: turns dropout on.
          return_weights: return the weights too.

        Raises:
          ValueError: weights are asked for, and there is no attention.
        """
        if return_weights and self.attention is None:
            raise ValueError(
                "return_weights asks for attention, but this model has attention=None; leave it out."
            )
        axis, T = x.ndim - 2, x.shape[-2]
        positions = jnp.broadcast_to(
            jnp.arange(T) if positions is None else positions, x.shape[:-1]
        )
        keys = None if key is None else jax.random.split(key, T)
        over_time = jax.tree.map(lambda a: jnp.moveaxis(a, axis, 0), (x, positions, texts))

        def step(carry: Carry, now: Any) -> tuple[Carry, Any]:
            (x, position, text), key = now
            allowed = None
            if text is not None:
                start, begin, allowed = text
                layers, fed = carry
                layers = jnp.where(start[..., None, None, None], begin, layers)
                carry = layers, jnp.where(start[..., None], 0, fed)
            carry, out, weights = self._step(x, carry, memory, position, allowed, key)
            return carry, (out, weights if return_weights else None)

        carry, (out, weights) = jax.lax.scan(step, carry, (over_time, keys))
        weights = None if weights is None else jnp.moveaxis(weights, 0, axis)[None, ..., None, :, :]
        return jnp.moveaxis(out, 0, axis), carry, weights

    def _step(
        self, x: Array, carry: Carry, memory: Any, position: Array, allowed: Any, key: Any
    ) -> tuple[Carry, Float[Array, "*B D"], Float[Array, "*B S"] | None]:
        """Computes the next carry, the vector of the output layer, and the weights or None."""
        layers, fed = carry
        mask = None if allowed is None else allowed[..., None, None, :]

        def attend(query: Float[Array, "*B D"]) -> tuple[Array, Array]:
            context, weights = self.attention(
                query[..., None, :],
                memory,
                mask,
                positions=position[..., None],
                return_weights=True,
            )
            return context[..., 0, :], weights[..., 0, 0, :]

        read, weights, context = x, None, fed
        if self.before:
            context, weights = attend(layers[..., -1, 0, :])
        if self.before or self.feeding:
            read = jnp.concatenate([x, context], axis=-1)
        found = []
        for index, cell in enumerate(self.cells):
            if found:
                own = None if key is None else jax.random.fold_in(key, index)
                read = dropout(found[-1][..., 0, :], self.dropout_rate, own)
            found.append(cell(cell.input(read), layers[..., index, :, :]))
        layers, out = jnp.stack(found, axis=-3), found[-1][..., 0, :]
        if self.before:
            out = self.readout(jnp.concatenate([out, x, context], axis=-1)).max(-1)
        elif self.attention is not None:
            context, weights = attend(out)
            out = jnp.tanh(self.readout(jnp.concatenate([context, out], axis=-1)))
        return (layers, out if self.feeding else fed), out, weights
