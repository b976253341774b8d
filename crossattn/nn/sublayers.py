"""The sublayers of a block, and the configs that they are built from.

A ``BlockConfig`` makes the sublayers of a Transformer; a ``Sublayer`` takes any other module.
"""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.axes import placed
from crossattn.nn.attention import MultiHeadAttention
from crossattn.nn.chunked import ChunkedAttention
from crossattn.nn.feedforward import Activation, FeedForward
from crossattn.nn.inputs import PositionBias, PositionScheme
from crossattn.nn.layers import Linear, NormName, linear, norm, zeroed
from crossattn.nn.positions import RelativeBias
from crossattn.ops.dropout import dropout
from crossattn.ops.positions.rotary import RopeScaling
from crossattn.types import Array, Count, Float, Key, Positive, Rate


@dataclass(frozen=True)
class AttentionConfig:
    """The shape of an attention layer, by the arguments of ``MultiHeadAttention``.

    Attributes:
      num_heads: query heads, N.
      num_kv_heads: key and value heads, K; None is N.
      head_dim: size of a head, H; None is D / N.
      value_dim: size of a value head, Hv; None is H.
      use_bias: biases in linear layers.
      key_bias, out_bias: a bias in the projection of keys, of the output; None is ``use_bias``.
      scale: factor of the logits; None is ``H ** -0.5``.
      qk_norm: norm on query and key heads.
      rope_base: base of rotary positions in self-attention; None is no rotation.
      rope_scaling: the scaling of rotary frequencies; None is none.
      num_persistent: persistent vectors of each head in self-attention, P; None is none.
      dropout_rate: of attention weights.
    """

    num_heads: Count
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    value_dim: Count | None = None
    use_bias: bool = True
    key_bias: bool | None = None
    out_bias: bool | None = None
    scale: Positive | None = None
    qk_norm: bool = False
    rope_base: Positive | None = None
    rope_scaling: RopeScaling | None = None
    num_persistent: Count | None = None
    dropout_rate: Rate = 0.0


@dataclass(frozen=True)
class FeedForwardConfig:
    """The shape of a feed-forward network.

    Attributes:
      hidden: size of the hidden layer, F; None is no network.
      activation: between its layers, see ``FeedForward``.
      use_bias: biases in linear layers.
      dropout_rate: of hidden features.
    """

    hidden: Count | None
    activation: Activation = "relu"
    use_bias: bool = True
    dropout_rate: Rate = 0.0


@dataclass(frozen=True)
class BlockConfig:
    """The shape of a block. ``BlockConfig.of`` makes one of flat values, as config files hold them.

    Attributes:
      dim: model size, D.
      attention: of self-attention, and of cross-attention unless ``cross`` is given.
      mlp: of the feed-forward network.
      cross: of cross-attention; None is ``attention``.
      norm: layer norm or RMS norm.
      norm_epsilon: added to the variance.
      norm_first: pre-norm (x + f(norm(x))) or post-norm (norm(x + f(x))).
      relative_buckets, relative_distance: of the "relative" position scheme, see ``RelativeBias``.
      dropout_rate: of sublayer outputs.
      dtype: computation dtype.
      condition_dim: size C of the condition of each example, see ``Residual``; None is no condition. A
        model sets it, not a config file.
    """

    dim: Count
    attention: AttentionConfig
    mlp: FeedForwardConfig
    cross: AttentionConfig | None = None
    norm: NormName = "layer"
    norm_epsilon: Positive = 1e-6
    norm_first: bool = True
    relative_buckets: Annotated[int, "[4, inf)"] = 32
    relative_distance: Count = 128
    dropout_rate: Rate = 0.0
    dtype: Any = None
    condition_dim: int | None = None

    @classmethod
    def of(cls, dim: int, num_heads: int, mlp_dim: int | None, **values: Any) -> "BlockConfig":
        """Makes a block of flat values, by the names in ``BLOCK_KEYS``: the keys of config files.

        ``mlp_dim`` None leaves the feed-forward network out: with ``num_persistent``, all-attention layers.

        Raises:
          TypeError: a name is unknown.
        """
        shape = cls(dim, AttentionConfig(num_heads), FeedForwardConfig(mlp_dim))
        return shape.changed(**values)

    def changed(self, **values: Any) -> "BlockConfig":
        """Returns a copy with other flat values, as in ``of``.

        Attention values change self- and cross-attention; ``cross_`` values change cross-attention alone.

        Raises:
          TypeError: a name is unknown.
        """
        if unknown := [name for name in values if name not in BLOCK_KEYS]:
            raise TypeError(
                f"a block has no {', '.join(unknown)}; expected of {', '.join(sorted(BLOCK_KEYS))}."
            )
        attention = {
            _ATTENTION_KEYS[name]: x for name, x in values.items() if name in _ATTENTION_KEYS
        }
        cross = None if self.cross is None else replace(self.cross, **attention)
        if own := {_CROSS_KEYS[name]: x for name, x in values.items() if name in _CROSS_KEYS}:
            cross = replace(cross or replace(self.attention, **attention), **own)
        mlp = {_MLP_KEYS[name]: x for name, x in values.items() if name in _MLP_KEYS}
        return replace(
            self,
            attention=replace(self.attention, **attention),
            cross=cross,
            mlp=replace(self.mlp, **mlp),
            **{name: x for name, x in values.items() if name in _OWN_KEYS},
        )

    def position_bias(
        self, positions: PositionScheme, rngs: nnx.Rngs, *, bidirectional: bool
    ) -> PositionBias:
        """Makes the bias that the self-attention layers of a stack of these blocks share.

        Raises:
          ValueError: there is no such scheme, or it is "rope" and the blocks do not rotate.
        """
        if positions == "rope" and self.attention.rope_base is None:
            raise ValueError(
                'positions is "rope", but the blocks have no rope_base and rotate nothing; expected '
                "BlockConfig.of(.., rope_base=10000.0)."
            )
        return PositionBias(
            positions,
            self.attention.num_heads,
            buckets=self.relative_buckets,
            max_distance=self.relative_distance,
            bidirectional=bidirectional,
            rngs=rngs,
        )

    def normalise(self, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
        """Makes a norm of vectors of size ``dim``."""
        return norm(self.norm, self.dim, epsilon=self.norm_epsilon, dtype=self.dtype, rngs=rngs)

    def self_attention(self, rngs: nnx.Rngs, *, causal: bool = False) -> "Sublayer":
        """Makes a sublayer in which ``x`` reads itself; ``causal``, no later positions."""
        shape = vars(self.attention)
        attention = MultiHeadAttention(self.dim, **shape, dtype=self.dtype, rngs=rngs)
        return Sublayer(attention, Residual(self, rngs), reads=ITSELF, causal=causal)

    def cross_attention(
        self,
        rngs: nnx.Rngs,
        *,
        memory_dim: int,
        reads: str = "source",
        gated: bool = False,
        norm_memory: bool = False,
        skip: bool = True,
    ) -> "Sublayer":
        """Makes a sublayer in which ``x`` reads the memory of that name, of vectors of size ``memory_dim``.

        ``norm_memory`` normalises them, as ``x`` is; for ``gated`` and ``skip`` see ``Residual``.
        """
        own = dict(rope_base=None, rope_scaling=None, num_persistent=None)
        shape = replace(self.cross or self.attention, **own)
        options: dict[str, Any] = dict(dtype=self.dtype, rngs=rngs)
        if norm_memory:
            memory_norm = norm(self.norm, memory_dim, epsilon=self.norm_epsilon, **options)
            options["memory_norm"] = memory_norm
        attention = MultiHeadAttention(self.dim, memory_dim=memory_dim, **vars(shape), **options)
        return Sublayer(attention, Residual(self, rngs, gated=gated, skip=skip), reads=reads)

    def chunked_attention(
        self,
        rngs: nnx.Rngs,
        *,
        chunk: int,
        memory_dim: int,
        reads: str = "neighbours",
        relative: bool = False,
        **options: Any,
    ) -> "Sublayer":
        """Makes a sublayer in which ``x`` reads neighbours of its chunks of so many tokens, [*B C K R M].

        ``relative`` adds a bias of distances with the "relative" scheme's buckets; for the other options see
        ``cross_attention``, and for the neighbours ``ChunkedAttention``.
        """
        own = self.cross_attention(rngs, memory_dim=memory_dim, reads=reads, **options)
        bias, heads = None, (self.cross or self.attention).num_heads
        if relative:
            sizes = self.relative_buckets, self.relative_distance
            bias = RelativeBias(heads, *sizes, bidirectional=True, rngs=rngs)
        return replace(own, inner=ChunkedAttention(own.inner, chunk, bias), by_position=True)

    def feedforward(self, rngs: nnx.Rngs, *, gated: bool = False) -> "Sublayer":
        """Makes a sublayer with a feed-forward network.

        Raises:
          ValueError: this shape has none.
        """
        if self.mlp.hidden is None:
            raise ValueError(
                "mlp_dim is None, but this block has a feed-forward network; expected its size."
            )
        network = FeedForward(self.dim, **vars(self.mlp), dtype=self.dtype, rngs=rngs)
        return Sublayer(network, Residual(self, rngs, gated=gated))


# Flat names, and those of the parts; "use_bias" is both attention's and the network's.
_SAME = ("num_heads", "num_kv_heads", "head_dim", "use_bias", "key_bias", "qk_norm", "rope_base")
_SAME += ("num_persistent",)
_ATTENTION_KEYS = {name: name for name in _SAME} | {
    "attention_scale": "scale",
    "attention_dropout_rate": "dropout_rate",
}
_CROSS_KEYS = {"cross_heads": "num_heads", "cross_head_dim": "head_dim"}
_MLP_KEYS = {
    "mlp_dim": "hidden",
    "activation": "activation",
    "use_bias": "use_bias",
    "mlp_dropout_rate": "dropout_rate",
}
_NO_KEYS = ("attention", "cross", "mlp", "condition_dim")
_OWN_KEYS = [f.name for f in fields(BlockConfig) if f.name not in _NO_KEYS]
BLOCK_KEYS: dict[str, tuple[type, str]] = {
    **{name: (BlockConfig, name) for name in _OWN_KEYS},
    **{name: (FeedForwardConfig, field) for name, field in _MLP_KEYS.items()},
    **{name: (AttentionConfig, field) for name, field in (_ATTENTION_KEYS | _CROSS_KEYS).items()},
}
"""Flat names of a block's values, the keys of config files: the class and field of each."""


class Residual(nnx.Module):
    """A residual connection: ``x + dropout(f(norm(x)))``, or post-norm, ``norm(x + dropout(f(x)))``.

    A condition c [*B C], with a ``condition_dim``, makes the norm ``(1 + W c) norm(x) + V c``, and multiplies
    f's result by ``U c``. W, V and U are 0 at initialisation.

    Args:
      config: the kind and place of the norm, the rate of dropout, and the size of a condition.
      gated: multiply f's result by ``tanh(gate)``, a learnt number that is 0 at initialisation, so that a
        sublayer added to a trained model leaves its outputs unchanged at first.
      skip: add ``x``; otherwise f's result replaces it.

    Source: Vaswani et al. 2017, section 3.1; pre-norm, Xiong et al. 2020; the gate, Alayrac et al. 2022;
    conditions, Perez et al. 2018, "FiLM", and Peebles and Xie 2023, "adaLN-Zero", section 3.2.
    """

    def __init__(
        self, config: BlockConfig, rngs: nnx.Rngs, *, gated: bool = False, skip: bool = True
    ):
        self.norm = config.normalise(rngs)
        self.gate = nnx.Param(jnp.zeros(()), axes=()) if gated else None
        self.scale, self.shift, self.opening = (
            None if config.condition_dim is None else _zeros(config, rngs) for _ in range(3)
        )
        self.skip = skip
        self.norm_first = config.norm_first
        self.dropout_rate = config.dropout_rate

    def pre_norm(
        self, x: Float[Array, "*#B T D"], condition: Float[Array, "*B C"] | None = None
    ) -> Float[Array, "*B T D"]:
        """Returns the input of the sublayer."""
        return self._normalised(x, condition) if self.norm_first else x

    def add_residual(
        self,
        x: Float[Array, "*#B T D"],
        update: Float[Array, "*B T D"],
        key: Key[Array, ""] | None,
        condition: Float[Array, "*B C"] | None = None,
    ) -> Float[Array, "*B T D"]:
        """Returns the input of the next sublayer.

        Raises:
          ValueError: one of condition and ``condition_dim`` is given without the other, or the sum is of
            vectors of different sizes.
        """
        if (condition is None) != (self.opening is None):
            given, size = ("no", "a") if condition is None else ("a", "no")
            raise ValueError(f"got {given} condition, but this block has {size} condition_dim.")
        if self.skip and update.shape[-1] != (dim := x.shape[-1]):
            raise ValueError(
                f"a residual connection adds vectors of size {update.shape[-1]} to x of size {dim}; expected "
                f"a sublayer that returns vectors of size {dim}, such as attention with out_dim={dim}."
            )
        if self.gate is not None:
            update = jnp.tanh(self.gate[...]).astype(update.dtype) * update
        if self.opening is not None and condition is not None:
            update = self.opening(condition)[..., None, :] * update
        update = dropout(update, self.dropout_rate, key)
        x = placed(x + update if self.skip else update, "embed")
        return x if self.norm_first else self._normalised(x, condition)

    def _normalised(self, x: Array, condition: Array | None) -> Array:
        x = self.norm(x)
        if self.scale is None or condition is None:
            return x
        scale, shift = (layer(condition)[..., None, :] for layer in (self.scale, self.shift))
        return placed((1 + scale) * x + shift, "embed")


def _zeros(config: BlockConfig, rngs: nnx.Rngs) -> Linear:
    """Makes a linear layer from a condition, with parameters of 0."""
    options: dict[str, Any] = dict(in_axes=("condition",), out_axes=("embed",), dtype=config.dtype)
    return zeroed(linear(config.condition_dim or 0, config.dim, **options, rngs=rngs))


def split(key: Key[Array, ""] | None, count: int) -> list[Key[Array, ""] | None]:
    """Splits a key into ``count`` keys; None, which turns dropout off, into Nones."""
    return [None] * count if key is None else list(jax.random.split(key, count))


ITSELF = "itself"
"""The memory that self-attention reads."""


@dataclass(frozen=True)
class Sublayer:
    """One sublayer of a ``Block``.

    Attributes:
      inner: a feed-forward network, called as ``inner(x, dropout_key)``; or attention, called as
        ``MultiHeadAttention`` is. Self-attention also has its ``extend`` and ``before``, and attention
        to a memory its ``memory``.
      residual: the norm and the residual connection.
      reads: the name of the memory that attention reads, or ``ITSELF``; None is a feed-forward network.
      causal: self-attention reads no later positions, unless a call passes another mask.
      by_position: attention to a memory is called with ``positions``, those of ``x`` in its text; None is a
        whole text.
    """

    inner: nnx.Module
    residual: Residual
    reads: str | None = None
    causal: bool = False
    by_position: bool = False
