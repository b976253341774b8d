"""Flax's layers with this package's logical axis names, and an embedding that is also the output."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from crossattn import axes
from crossattn.axes import placed
from crossattn.nn.meshes import on_any_mesh
from crossattn.ops import product
from crossattn.types import Array, Float, Int

NormName = Literal["layer", "rms"]


class Linear(nnx.LinearGeneral):
    """``linear``. Its operand and its result have places by the names of the kernel's axes.

    A product of parts that are split two ways, with no such places around it, can give examples the results
    of others: ``tests/nn/eight_devices.py`` has XLA's mistake.
    """

    in_axes: tuple[str | None, ...]
    out_axes: tuple[str | None, ...]

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """[*B T *in] -> [*B T *out]."""
        out = super().__call__(placed(inputs, *self.in_axes), out_sharding)
        return placed(out, *self.out_axes)


def linear(
    in_features: int | Sequence[int],
    out_features: int | Sequence[int],
    *,
    in_axes: Sequence[str | None],
    out_axes: Sequence[str | None],
    use_bias: bool = True,
    dtype=None,
    rngs: nnx.Rngs,
) -> Linear:
    """A dense layer over one or several trailing axes, its kernel named ``(*in_axes, *out_axes)``."""
    layer = Linear(
        in_features,
        out_features,
        axis=tuple(range(-len(in_axes), 0)),
        use_bias=use_bias,
        dtype=dtype,
        # Flax flattens grouped axes before it initialises, so the fans are their products.
        kernel_init=nnx.initializers.glorot_uniform(),
        kernel_metadata={"axes": (*in_axes, *out_axes)},
        bias_metadata={"axes": tuple(out_axes)},
        dot_general=product.dot_general,
        rngs=rngs,
    )
    layer.in_axes, layer.out_axes = tuple(in_axes), tuple(out_axes)
    return layer


def norm(
    kind: NormName, dim: int, *, epsilon: float = 1e-6, dtype=None, rngs: nnx.Rngs
) -> nnx.LayerNorm | nnx.RMSNorm:
    """Layer norm, or root-mean-square norm, over the last axis.

    Source: Ba et al. 2016; Zhang and Sennrich 2019.
    """
    metadata = {"axes": ("norm",)}
    options: dict[str, Any] = dict(epsilon=epsilon, dtype=dtype, scale_metadata=metadata, rngs=rngs)
    if kind == "rms":
        return nnx.RMSNorm(dim, **options)
    if kind == "layer":
        return nnx.LayerNorm(dim, bias_metadata=metadata, **options)
    raise ValueError(f"norm is {kind!r}; expected 'layer' or 'rms'.")


class Embedding(nnx.Module):
    """Token vectors; ``logits`` reads the same table as an output layer.

    Args:
      vocab_size: number of tokens, V.
      dim: model size, D.
      scale: what vectors are multiplied by; None is ``dim ** 0.5``.
      dtype: computation dtype; parameters are float32.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        scale: float | None = None,
        dtype=None,
        rngs: nnx.Rngs,
    ):
        self.table = nnx.Param(
            jax.random.normal(rngs.params(), (vocab_size, dim)) * dim**-0.5,
            axes=("vocab", "embed"),
        )
        self.scale = dim**0.5 if scale is None else scale
        self.dtype = dtype

    @on_any_mesh
    def __call__(self, tokens: Int[Array, "*B T"]) -> Float[Array, "*B T D"]:
        """Vectors, of unit variance at first: the table is kept small for the output, and scaled here.

        Source: Vaswani et al. 2017, section 3.4.
        """
        vectors = looked_up(self.table[...], tokens).astype(self.dtype or jnp.float32)
        return placed(vectors * self.scale, "embed")

    @on_any_mesh
    def logits(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T V"]:
        """Scores of every token, float32: ``x table^T``. Source: Press and Wolf 2017."""
        return token_logits(x, self.table[...])


def looked_up(table: Float[Array, "V D"], tokens: Int[Array, "*B T"]) -> Float[Array, "*B T D"]:
    """Rows of a table. On a mesh devices gather its parts, and its gradient is scattered.

    Left to itself XLA sends every example's vectors to the devices that hold a part of the table.
    """
    mesh = axes.mesh_of(table)
    if mesh is None or mesh.manual_axes or not isinstance(tokens, jax.core.Tracer):
        return jnp.take(table, tokens, axis=0)
    among, names = axes.automatic(mesh), ("batch", *[None] * (tokens.ndim - 2), "length")
    rows = axes.spec(names[-tokens.ndim :], tokens.shape, mesh, among=among)
    places = axes.spec(("vocab", "embed"), table.shape, mesh, among=among)

    # Devices that have the same tokens add up what each finds in its part; others gather the parts.
    vocab, embed = map(axes.several, places)
    split = {axis for entry in rows for axis in axes.several(entry)}
    kept = tuple(itertools.takewhile(lambda axis: axis not in split, vocab))

    def own(table: Array, tokens: Array) -> Array:
        for axis, parts in enumerate((vocab[len(kept) :], embed)):
            table = jax.lax.all_gather(table, parts, axis=axis, tiled=True) if parts else table
        if not kept:
            return jnp.take(table, tokens, axis=0)
        tokens = tokens - jax.lax.axis_index(kept) * table.shape[0]
        here = (tokens >= 0) & (tokens < table.shape[0])
        vectors = jnp.take(table, jnp.where(here, tokens, 0), axis=0)
        return jax.lax.psum(jnp.where(here[..., None], vectors, 0), kept)

    out = PartitionSpec(*rows, None)
    call = jax.shard_map(own, mesh=mesh, in_specs=(places, rows), out_specs=out, check_vma=False)
    return call(table, tokens)


def token_logits(x: Float[Array, "*B T D"], table: Float[Array, "V D"]) -> Float[Array, "*B T V"]:
    """``x table^T``, float32."""
    meeting = ((x.ndim - 1,), (1,)), ((), ())
    x = placed(x, "embed")
    scores = product.dot_general(
        x, table.astype(x.dtype), meeting, preferred_element_type=jnp.float32
    )
    return placed(scores, "vocab")
