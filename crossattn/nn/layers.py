"""Flax's layers with this package's logical axis names, and an embedding that is also the output."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from crossattn.axes import placed
from crossattn.nn.meshes import on_any_mesh
from crossattn.ops import product
from crossattn.rows import OwnTokens
from crossattn.types import Array, Float, Int

NormName = Literal["layer", "rms"]


class Linear(nnx.LinearGeneral):
    """The layer of ``linear``, which constrains the sharding of its operand and result by the kernel's axes.

    Without the constraints XLA can exchange examples in a chain of products that are split two ways;
    ``tests/nn/eight_devices.py`` reproduces the mistake.
    """

    in_axes: tuple[str | None, ...]
    out_axes: tuple[str | None, ...]

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Computes [*B T *in] -> [*B T *out]."""
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
    """Makes a dense layer over one or several trailing axes, its kernel named ``(*in_axes, *out_axes)``."""
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


def zeroed(layer: Linear) -> Linear:
    """Sets the kernel of a layer to 0, as its bias is, so that it says nothing at first."""
    layer.kernel.set_value(jnp.zeros_like(layer.kernel.get_value()))
    return layer


def norm(
    kind: NormName, dim: int, *, epsilon: float = 1e-6, dtype=None, rngs: nnx.Rngs
) -> nnx.LayerNorm | nnx.RMSNorm:
    """Makes a layer norm, or a root-mean-square norm, over the last axis.

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
      scale: factor of the vectors; None is ``dim ** 0.5``.
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
        """Looks vectors up and scales them to unit variance; the unscaled table is that of the output layer.

        Raises:
          ValueError: as ``check_ids`` does.
        Source: Vaswani et al. 2017, section 3.4.
        """
        check_ids(tokens, self.table.shape[0])
        vectors = looked_up(self.table[...], tokens).astype(self.dtype or jnp.float32)
        return placed(vectors * self.scale, "embed")

    @on_any_mesh
    def logits(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T V"]:
        """Computes scores of every token, float32: ``x table^T``. Source: Press and Wolf 2017."""
        return token_logits(x, self.table[...])


def check_ids(ids: Int[Array, "..."], count: int, name: str = "tokens") -> None:
    """Checks that ids are rows of a table of ``count``; traced ids are not checked.

    Raises:
      ValueError: an id is outside the table.
    """
    if isinstance(ids, jax.core.Tracer) or not getattr(ids, "is_fully_addressable", True):
        return
    known = np.asarray(ids)
    if wrong := known[(known < 0) | (known >= count)].tolist():
        raise ValueError(f"{name} has the id {wrong[0]}; expected 0 to {count - 1}, this model's.")


def looked_up(table: Float[Array, "V D"], tokens: Int[Array, "*B T"]) -> Float[Array, "*B T D"]:
    """Looks up rows of a table; an id outside the table gives NaN.

    On a mesh devices gather the table's parts and scatter its gradient. XLA by itself sends every example's
    vectors to the devices that hold a part of the table.
    """
    here = OwnTokens.of(table, tokens)
    if here is None:
        return _rows(table, tokens)
    count = table.shape[0]

    def own(part: Array, tokens: Array) -> Array:
        table = here.gathered(part)
        if not here.kept:
            return _rows(table, tokens)
        there = (tokens >= 0) & (tokens < count)
        tokens = tokens - jax.lax.axis_index(here.kept) * table.shape[0]
        found = (tokens >= 0) & (tokens < table.shape[0])
        vectors = _rows(table, jnp.where(found, tokens, 0))
        vectors = jax.lax.psum(jnp.where(found[..., None], vectors, 0), here.kept)
        return jnp.where(there[..., None], vectors, jnp.nan)

    return here.each(own, PartitionSpec(*here.rows, None), table, tokens)


def _rows(table: Float[Array, "V D"], ids: Int[Array, "*B T"]) -> Float[Array, "*B T D"]:
    options: dict[str, Any] = dict(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    return table.at[ids].get(**options)


def token_logits(x: Float[Array, "*B T D"], table: Float[Array, "V D"]) -> Float[Array, "*B T V"]:
    """Computes ``x table^T``, float32."""
    meeting = ((x.ndim - 1,), (1,)), ((), ())
    x = placed(x, "embed")
    scores = product.dot_general(
        x, table.astype(x.dtype), meeting, preferred_element_type=jnp.float32
    )
    return placed(scores, "vocab")
