"""Recurrent layers: GRU and LSTM cells, and stacks of them over a sequence, in one direction or both.

A state [*B P H] is h of a GRU (P = 1), h and c of an LSTM (P = 2). States begin with 0 at the first token of
each text of a packed row, so a row equals its texts alone.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.nn.layers import linear
from crossattn.nn.sublayers import split
from crossattn.ops.dropout import dropout
from crossattn.types import Array, Bool, Float, Int, Key

Cell = Literal["gru", "lstm"]
_GATES = {"gru": 3, "lstm": 4}
_PARTS = {"gru": 1, "lstm": 2}


class RecurrentCell(nnx.Module):
    """A GRU or an LSTM cell.

        r, z, n = W x + b,  R, Z, N = U h + d                                            GRU
        h <- (1 - g) tanh(n + sigmoid(r + R) N) + g h,  g = sigmoid(z + Z)
        i, f, g, o = W x + b + U h                                                       LSTM
        c <- sigmoid(f) c + sigmoid(i) tanh(g);  h <- sigmoid(o) tanh(c)

    Gates are in PyTorch's order. The reset gate follows the product, as in cuDNN, which makes it one product
    a step. The LSTM's forget bias begins with 1.

    Args:
      kind: "gru" or "lstm".
      in_features: size of the inputs, D.
      dim: size of the state, H.
      dtype: computation dtype.

    Raises:
      ValueError: the kind is unknown.
    Source: Cho et al. 2014 (arXiv 1406.1078v1); Hochreiter and Schmidhuber 1997, Gers et al. 2000; the bias,
    Jozefowicz et al. 2015.
    """

    def __init__(
        self, kind: Cell, in_features: int, dim: int, *, dtype: Any = None, rngs: nnx.Rngs
    ):
        if kind not in _GATES:
            raise ValueError(f"cell is {kind!r}; expected one of {', '.join(_GATES)}.")
        options: dict[str, Any] = dict(in_axes=("embed",), out_axes=(None, "mlp"), dtype=dtype)
        gates = (_GATES[kind], dim)
        self.input = linear(in_features, gates, **options, rngs=rngs)
        self.state = linear(dim, gates, use_bias=kind == "gru", **options, rngs=rngs)
        if kind == "lstm" and self.input.bias is not None:
            self.input.bias.set_value(self.input.bias[...].at[1].set(1.0))
        self.kind, self.dim = kind, dim

    def begin(self, batch: tuple[int, ...], dtype: Any) -> Float[Array, "*B P H"]:
        """Returns states of 0."""
        return jnp.zeros((*batch, _PARTS[self.kind], self.dim), dtype)

    def __call__(
        self, x: Float[Array, "*B G H"], state: Float[Array, "*B P H"]
    ) -> Float[Array, "*B P H"]:
        """Computes the next state.

        Args:
          x: ``cell.input`` of the inputs, which a layer computes for all times at once.
          state: [*B P H].
        """
        h = state[..., 0, :]
        own = self.state(h)
        if self.kind == "gru":
            reset, keep = (nnx.sigmoid(x[..., i, :] + own[..., i, :]) for i in (0, 1))
            new = jnp.tanh(x[..., 2, :] + reset * own[..., 2, :])
            return ((1 - keep) * new + keep * h)[..., None, :]
        enter, forget, new, out = ((x + own)[..., i, :] for i in range(4))
        c = nnx.sigmoid(forget) * state[..., 1, :] + nnx.sigmoid(enter) * jnp.tanh(new)
        return jnp.stack([nnx.sigmoid(out) * jnp.tanh(c), c], axis=-2)


class RecurrentStack(nnx.Module):
    """Layers of cells over whole sequences; with both directions each has half of the vector.

    Args:
      kind: "gru" or "lstm".
      num_layers: L.
      in_features: size of the inputs, E.
      dim: size of the vectors, D.
      bidirectional: half of the cells run from the end.
      dropout_rate: of the vectors between layers (Zaremba et al. 2014).
      dtype: computation dtype.

    Raises:
      ValueError: the kind is unknown, or ``dim`` is odd where two directions share it.
    """

    def __init__(
        self,
        kind: Cell,
        num_layers: int,
        in_features: int,
        dim: int,
        *,
        bidirectional: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        directions = 1 + bidirectional
        if dim % directions:
            raise ValueError(f"dim is {dim}; two directions expect an even number.")

        def cells(index: int) -> Any:
            size = in_features if index == 0 else dim
            options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
            made = (
                RecurrentCell(kind, size, dim // directions, **options) for _ in range(directions)
            )
            return nnx.List(made)

        self.layers = nnx.List([cells(index) for index in range(num_layers)])
        self.size = dim // directions
        self.dropout_rate = dropout_rate

    def __call__(
        self,
        x: Float[Array, "*B S E"],
        segment_ids: Int[Array, "*B S"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "*B S D"], list[Float[Array, "*B S P D"]]]:
        """Computes the vectors of the last layer, and the states of each layer after each position."""
        found: list[Array] = []
        for layer, own in zip(self.layers, split(key, len(self.layers)), strict=True):
            x = dropout(x, self.dropout_rate if found else 0.0, own)
            both = [over(cell, x, segment_ids, bool(i)) for i, cell in enumerate(layer)]
            found.append(jnp.concatenate(both, axis=-1))
            x = found[-1][..., 0, :]
        return x, found

    def final(
        self, states: Float[Array, "*B S P D"], allowed: Bool[Array, "*B T S"]
    ) -> Float[Array, "*B T P D"]:
        """Takes the states after the last place of ``allowed`` in each direction, T times a row."""
        last = allowed.shape[-1] - 1 - jnp.argmax(allowed[..., ::-1], axis=-1)
        there = jnp.take_along_axis(states, last[..., None, None], axis=-3)
        if self.size == states.shape[-1]:
            return there
        back = jnp.take_along_axis(states, jnp.argmax(allowed, axis=-1)[..., None, None], axis=-3)
        return jnp.concatenate([there[..., : self.size], back[..., self.size :]], axis=-1)


def over(
    cell: RecurrentCell,
    x: Float[Array, "*B S E"],
    segment_ids: Int[Array, "*B S"] | None,
    reverse: bool,
) -> Float[Array, "*B S P H"]:
    """Scans a cell over a sequence, from its end if ``reverse``; returns the state after each position."""
    gates = jnp.moveaxis(cell.input(x), -3, 0)
    starts = None
    if segment_ids is not None:
        starts = jnp.moveaxis(segment_starts(segment_ids, reverse), -1, 0)

    def step(state: Array, now: tuple[Array, Array | None]) -> tuple[Array, Array]:
        own, start = now
        if start is not None:
            state = jnp.where(start[..., None, None], 0, state)
        state = cell(own, state)
        return state, state

    begin = cell.begin(x.shape[:-2], gates.dtype)
    _, states = jax.lax.scan(step, begin, (gates, starts), reverse=reverse)
    return jnp.moveaxis(states, 0, -3)


def segment_starts(segment_ids: Int[Array, "*B T"], reverse: bool = False) -> Bool[Array, "*B T"]:
    """Returns where each text of a packed row begins, or with ``reverse`` ends; padding is a text too."""
    ids = segment_ids[..., ::-1] if reverse else segment_ids
    change = ids[..., 1:] != ids[..., :-1]
    starts = jnp.concatenate([jnp.ones_like(ids[..., :1], bool), change], axis=-1)
    return starts[..., ::-1] if reverse else starts
