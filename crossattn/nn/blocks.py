"""Transformer blocks: named residual sublayers, each of which reads nothing, ``x`` itself or a named memory.

The encoder block, the decoder block and any other are compositions of one ``Block``. The order of its
sublayers is that of its arguments, and their names are those of the parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.axes import placed
from crossattn.nn.attention import MultiHeadAttention
from crossattn.nn.encoded import Encoded
from crossattn.nn.feedforward import Activation, FeedForward
from crossattn.nn.inputs import PositionBias, PositionScheme
from crossattn.nn.layers import NormName, norm
from crossattn.nn.meshes import on_any_mesh
from crossattn.ops import masks
from crossattn.ops.dropout import dropout
from crossattn.ops.exporting import exportable
from crossattn.ops.masks import Mask
from crossattn.ops.memory import Memory
from crossattn.types import Array, Bool, Float, Int, Key


@dataclass(frozen=True)
class AttentionConfig:
    """The shape of an attention layer.

    Attributes:
      num_heads: N.
      num_kv_heads: K; None is N.
      head_dim: H; None is D / N.
      value_dim: size of a value head, Hv; None is H.
      use_bias: biases in linear layers.
      key_bias: a bias in the projection of keys; None is ``use_bias``.
      scale: what logits are multiplied by; None is ``H ** -0.5``.
      qk_norm: norm on query and key heads.
      rope_base: rotary self-attention; None is none.
      dropout_rate: on attention weights.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    use_bias: bool = True
    key_bias: bool | None = None
    scale: float | None = None
    qk_norm: bool = False
    rope_base: float | None = None
    dropout_rate: float = 0.0


@dataclass(frozen=True)
class FeedForwardConfig:
    """The shape of a feed-forward network.

    Attributes:
      hidden: its size, F.
      activation: see ``FeedForward``.
      use_bias: biases in linear layers.
      dropout_rate: on hidden features.
    """

    hidden: int
    activation: Activation = "relu"
    use_bias: bool = True
    dropout_rate: float = 0.0


@dataclass(frozen=True)
class BlockConfig:
    """The shape of a block. ``BlockConfig.of`` makes one of flat values, as config files hold them.

    Attributes:
      dim: model size, D.
      attention: of self-attention, and of cross-attention unless ``cross`` is given.
      mlp: of the feed-forward network.
      cross: of cross-attention where it differs; None is ``attention``.
      norm: "layer" or "rms".
      norm_epsilon: added to the variance.
      norm_first: pre-norm (x + f(norm(x))) or post-norm (norm(x + f(x))).
      relative_buckets, relative_distance: of the "relative" position scheme, see ``RelativeBias``.
      dropout_rate: on sublayer outputs.
      dtype: computation dtype.
    """

    dim: int
    attention: AttentionConfig
    mlp: FeedForwardConfig
    cross: AttentionConfig | None = None
    norm: NormName = "layer"
    norm_epsilon: float = 1e-6
    norm_first: bool = True
    relative_buckets: int = 32
    relative_distance: int = 128
    dropout_rate: float = 0.0
    dtype: Any = None

    @classmethod
    def of(cls, dim: int, num_heads: int, mlp_dim: int, **values: Any) -> "BlockConfig":
        """A block of flat values, by the names in ``BLOCK_KEYS``: the keys of config files.

        Raises:
          TypeError: there is no value of that name.
        """
        shape = cls(dim, AttentionConfig(num_heads), FeedForwardConfig(mlp_dim))
        return shape.changed(**values)

    def changed(self, **values: Any) -> "BlockConfig":
        """This block but for these flat values, as in ``of``.

        Self- and cross-attention change alike, but for values that are called ``cross_``.

        Raises:
          TypeError: there is no value of that name.
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

    def _attention(self, config: AttentionConfig, rngs: nnx.Rngs, **options: Any):
        return MultiHeadAttention(
            self.dim,
            config.num_heads,
            head_dim=config.head_dim,
            value_dim=config.value_dim,
            num_kv_heads=config.num_kv_heads,
            use_bias=config.use_bias,
            key_bias=config.key_bias,
            scale=config.scale,
            qk_norm=config.qk_norm,
            dropout_rate=config.dropout_rate,
            dtype=self.dtype,
            rngs=rngs,
            **options,
        )

    def position_bias(
        self, positions: PositionScheme, rngs: nnx.Rngs, *, bidirectional: bool
    ) -> PositionBias:
        """The bias that the self-attention layers of a stack of these blocks share."""
        return PositionBias(
            positions,
            self.attention.num_heads,
            buckets=self.relative_buckets,
            max_distance=self.relative_distance,
            bidirectional=bidirectional,
            rngs=rngs,
        )

    def normalise(self, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
        """A norm of this kind."""
        return norm(self.norm, self.dim, epsilon=self.norm_epsilon, dtype=self.dtype, rngs=rngs)

    def self_attention(self, rngs: nnx.Rngs, *, causal: bool = False) -> "Sublayer":
        """A sublayer in which ``x`` reads itself; ``causal``, no later positions."""
        attention = self._attention(self.attention, rngs, rope_base=self.attention.rope_base)
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
        """A sublayer in which ``x`` reads the memory of that name, of vectors of size ``memory_dim``.

        With ``norm_memory`` those are normalised, as ``x`` is; for ``gated`` and ``skip`` see ``Residual``.
        """
        options: dict[str, Any] = dict(epsilon=self.norm_epsilon, dtype=self.dtype, rngs=rngs)
        attention = self._attention(
            self.cross or self.attention,
            rngs,
            memory_dim=memory_dim,
            memory_norm=norm(self.norm, memory_dim, **options) if norm_memory else None,
        )
        return Sublayer(attention, Residual(self, rngs, gated=gated, skip=skip), reads=reads)

    def feedforward(self, rngs: nnx.Rngs, *, gated: bool = False) -> "Sublayer":
        """A sublayer with a feed-forward network."""
        network = FeedForward(
            self.dim,
            self.mlp.hidden,
            self.mlp.activation,
            use_bias=self.mlp.use_bias,
            dropout_rate=self.mlp.dropout_rate,
            dtype=self.dtype,
            rngs=rngs,
        )
        return Sublayer(network, Residual(self, rngs, gated=gated))


# Flat names, and those in the parts; "use_bias" is of both.
_SAME = ("num_heads", "num_kv_heads", "head_dim", "use_bias", "key_bias", "qk_norm", "rope_base")
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
_OWN_KEYS = {f.name for f in fields(BlockConfig)} - {"attention", "cross", "mlp"}
BLOCK_KEYS = frozenset({*_ATTENTION_KEYS, *_CROSS_KEYS, *_MLP_KEYS, *_OWN_KEYS})
"""The flat names of a block's values, which are keys of config files."""


class Residual(nnx.Module):
    """``x + dropout(f(norm(x)))``, or post-norm, ``norm(x + dropout(f(x)))``.

    Args:
      config: the kind of norm, where it stands, and the rate of dropout.
      gated: f's result is multiplied by ``tanh(gate)``, a learnt number that is 0 at first: a sublayer
        that is added to a trained model changes nothing before it has learnt.
      skip: ``x`` is added; otherwise f's result takes its place.

    Source: Vaswani et al. 2017, section 3.1; pre-norm, Xiong et al. 2020; the gate, Alayrac et al. 2022.
    """

    def __init__(
        self, config: BlockConfig, rngs: nnx.Rngs, *, gated: bool = False, skip: bool = True
    ):
        self.norm = config.normalise(rngs)
        self.gate = nnx.Param(jnp.zeros(()), axes=()) if gated else None
        self.skip = skip
        self.norm_first = config.norm_first
        self.dropout_rate = config.dropout_rate

    def pre_norm(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """What the sublayer gets."""
        return self.norm(x) if self.norm_first else x

    def add_residual(
        self, x: Float[Array, "*#B T D"], update: Float[Array, "*B T D"], key: Key[Array, ""] | None
    ) -> Float[Array, "*B T D"]:
        """What the next sublayer gets."""
        if self.gate is not None:
            update = jnp.tanh(self.gate[...]).astype(update.dtype) * update
        update = dropout(update, self.dropout_rate, key)
        x = placed(x + update if self.skip else update, "embed")
        return x if self.norm_first else self.norm(x)


def split(key: Key[Array, ""] | None, count: int) -> list[Key[Array, ""] | None]:
    """That many keys, or that many Nones: no key means no dropout."""
    return [None] * count if key is None else list(jax.random.split(key, count))


ITSELF = "itself"
"""What self-attention reads."""


@dataclass(frozen=True)
class Sublayer:
    """One sublayer of a ``Block``.

    Attributes:
      inner: a feed-forward network, called as ``inner(x, dropout_key)``; or attention, called as
        ``MultiHeadAttention`` is. Self-attention also has its ``extend`` and ``before``, and attention
        that reads a memory its ``memory``, which projects what is read once.
      residual: the norm, and how the result is added to ``x``.
      reads: the name of the memory that attention reads, or ``ITSELF``; None is a sublayer that reads none.
      causal: self-attention reads no later positions, unless a call names another mask.
    """

    inner: nnx.Module
    residual: Residual
    reads: str | None = None
    causal: bool = False


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockState:
    """What a block carries besides activations.

    Attributes:
      memories: projected memories by the name of the sublayer that reads them.
      cache: the self-attention cache, or None when whole sequences are given.
      weights: attention weights [*B N T S] of the last sublayer that reads a memory, when asked for.
    """

    memories: dict[str, Memory] = field(default_factory=dict)
    cache: Memory | None = None
    weights: Float[Array, "..."] | None = None


@dataclass(frozen=True)
class _Place:
    """A sublayer's name and what it reads, beside its parameters."""

    name: str
    reads: str | None
    causal: bool


class Block(nnx.Module):
    """Residual sublayers, one after the other.

    Args:
      scope: what profiles call self-attention in it.
      **sublayers: by name, in order; the parameters of sublayer ``x`` are those of ``x`` and ``x_residual``.

    Raises:
      ValueError: a sublayer has the name of something else that a block has; or it reads itself with
        attention that only reads memories, such as ``AdditiveAttention``.
    Example: ``Block(attention=config.self_attention(rngs), feedforward=config.feedforward(rngs))``.
    """

    def __init__(self, *, scope: str = "self_attention", **sublayers: Sublayer):
        names = [*sublayers, *(["scope"] if isinstance(scope, Sublayer) else [])]
        own = ("scope", "sublayers")
        if taken := [name for name in names if name in own or hasattr(Block, name)]:
            raise ValueError(
                f"a sublayer is called {taken[0]!r}, as something else of a block is; expected another name."
            )
        for name, sublayer in sublayers.items():
            _check_inner(name, sublayer)
            setattr(self, name, sublayer.inner)
            setattr(self, f"{name}_residual", sublayer.residual)
        self.sublayers = tuple(
            _Place(name, sublayer.reads, sublayer.causal) for name, sublayer in sublayers.items()
        )
        self.scope = scope

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*#B T D"],
        state: BlockState | None = None,
        key: Key[Array, ""] | None = None,
        *,
        memories: Mapping[str, Any] | None = None,
        mask: Mask | Bool[Array, "..."] | None = None,
        memory_masks: Mapping[str, Any] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        bias: Float[Array, "..."] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T D"], BlockState | None]:
        """[*B T D] -> [*B T D], and the state with its cache extended and its weights filled in.

        Args:
          x: [*B T D]; or [T D], the same for every example of the memories, as a Perceiver's latents are.
          state: memories that are projected already (``read``), and a cache where sequences come piece by
            piece; None is neither.
          key: turns dropout on.
          memories: what sublayers read whose memories are not in the state, by the names that they read:
            ``Encoded``, or vectors [*B S M].
          mask: of self-attention, the whole of it: ``causal() & segments(s)``, ``causal() | prefix(n)``,
            ``window(None, None) & key_padding(valid)`` to read later positions too. None is causal where
            the sublayer is, and everything where it is not.
          memory_masks: of attention to a memory, by its name, on top of the validity of what is read.
          positions: of the tokens, for rotary positions; None is where the cache stands, or ``arange``.
          bias: added to the logits of self-attention.
          return_weights: keep the weights of the last sublayer that reads a memory in the state.

        Raises:
          ValueError: a sublayer's memory is neither in the state nor among the memories, or the state has
            one that no sublayer reads, or a cache that several would share; or a causal sublayer's mask
            leaves open whether later positions may be read.
        """
        projected, memories = {} if state is None else state.memories, memories or {}
        self._check(projected, memories, memory_masks or {})
        keys = split(key, 2 * len(self.sublayers))
        cache, weights = None if state is None else state.cache, None
        if cache is not None:
            self._check_cache()
        for place, inner_key, outer_key in zip(self.sublayers, keys[::2], keys[1::2], strict=True):
            inner, residual = getattr(self, place.name), getattr(self, f"{place.name}_residual")
            hidden = residual.pre_norm(x)
            if place.reads is None:
                update = inner(hidden, inner_key)
            elif place.reads == ITSELF:
                own = mask
                if cache is not None:
                    cache = inner.extend(cache, hidden, positions=positions)
                if place.causal:
                    own = _ordered(mask, inner.before(x, cache), x.shape[-2])
                options: dict[str, Any] = dict(positions=positions, bias=bias)
                with jax.named_scope(self.scope):  # by which a plan finds its kernel
                    update = inner(hidden, cache, own, dropout_key=inner_key, **options)
            else:
                memory = projected.get(place.name)
                memory = _read(inner, memories[place.reads]) if memory is None else memory
                update = self._attend(
                    place, inner, hidden, memory, memory_masks, inner_key, return_weights
                )
                update, weights = update if return_weights else (update, None)
            x = residual.add_residual(x, update, outer_key)
        if state is None and not return_weights:
            return x, None
        return x, BlockState(memories=projected, cache=cache, weights=weights)

    @on_any_mesh
    def read(self, memories: Mapping[str, Any]) -> BlockState:
        """A state with each sublayer's memory of what it reads, projected once.

        Args:
          memories: ``Encoded``, or vectors [*B S M], by the names that sublayers read.
        """
        return BlockState(
            memories={
                place.name: _read(getattr(self, place.name), memories[place.reads])
                for place in self.sublayers
                if place.reads is not None and place.reads != ITSELF and place.reads in memories
            }
        )

    @property
    def memory_names(self) -> tuple[str, ...]:
        """What its sublayers read besides ``x`` itself."""
        names = (place.reads for place in self.sublayers)
        return tuple(name for name in names if name is not None and name != ITSELF)

    def cache(self, batch_shape: tuple[int, ...], size: int) -> Memory | None:
        """An empty cache of ``size`` slots for self-attention; None where there is none.

        Raises:
          ValueError: several sublayers of self-attention would share it.
        """
        self._check_cache()
        own = [place.name for place in self.sublayers if place.reads == ITSELF]
        return getattr(self, own[0]).cache(batch_shape, size) if own else None

    def _attend(self, place, inner, x, memory, memory_masks, key, return_weights) -> Any:
        with jax.named_scope("cross_attention"):
            return inner(
                x,
                memory,
                (memory_masks or {}).get(place.reads),
                dropout_key=key,
                return_weights=return_weights,
            )

    def _check(self, projected: Mapping, memories: Mapping, memory_masks: Mapping) -> None:
        """Attention to a memory has something to read, and what is projected has a reader."""
        readers = {
            place.name: place.reads for place in self.sublayers if place.reads not in (None, ITSELF)
        }
        for name, reads in readers.items():
            if name not in projected and reads not in memories:
                raise ValueError(
                    f"{name} of this {type(self).__name__} reads the memory {reads!r}, which neither its "
                    f"state nor memories has; give memories={{{reads!r}: vectors}}, or a state of "
                    "block.read."
                )
        if unread := [name for name in projected if name not in readers]:
            raise ValueError(
                f"the state has a memory for {unread[0]}, which no sublayer of this "
                f"{type(self).__name__} reads; expected those of {', '.join(readers) or 'none'}."
            )

    def _check_cache(self) -> None:
        """A state holds the keys and values of one sublayer."""
        own = [place.name for place in self.sublayers if place.reads == ITSELF]
        if len(own) > 1:
            raise ValueError(
                f"the state has one cache, and this {type(self).__name__} has {len(own)} sublayers of "
                f"self-attention, {', '.join(own)}; expected one: put them in blocks of their own."
            )


def _check_inner(name: str, sublayer: Sublayer) -> None:
    """What reads itself can be called with positions and a bias, and can go on from a cache."""
    if sublayer.reads == ITSELF and not hasattr(sublayer.inner, "extend"):
        raise ValueError(
            f"{name} reads itself, but its {type(sublayer.inner).__name__} has no extend(), which "
            "self-attention needs; expected MultiHeadAttention, or reads= the name of a memory."
        )


def _read(attention: Any, memory: Any) -> Any:
    """``attention``'s memory of ``Encoded``, or of bare vectors."""
    if isinstance(memory, Encoded):
        return attention.memory(memory.vectors, valid=memory.valid, positions=memory.positions)
    return attention.memory(memory)


class EncoderBlock(Block):
    """Self-attention, then feed-forward."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        super().__init__(
            scope="encoder_attention",
            attention=config.self_attention(rngs),
            feedforward=config.feedforward(rngs),
        )


class DecoderBlock(Block):
    """Masked self-attention, cross-attention (unless ``memory_dim`` is None), feed-forward.

    Self-attention is causal unless a call names another mask; cross-attention reads "source".

    Source: Vaswani et al. 2017, figure 1.
    """

    def __init__(self, config: BlockConfig, memory_dim: int | None, *, rngs: nnx.Rngs):
        sublayers = {"attention": config.self_attention(rngs, causal=True)}
        if memory_dim is not None:
            sublayers["cross"] = config.cross_attention(rngs, memory_dim=memory_dim)
        sublayers["feedforward"] = config.feedforward(rngs)
        super().__init__(scope="decoder_attention", **sublayers)

    def _check(self, projected: Mapping, memories: Mapping, memory_masks: Mapping) -> None:
        """Without cross-attention there is nothing to read or mask."""
        given = {
            "a source": bool(projected) or "source" in memories,
            "a mask of the source": memory_masks.get("source") is not None,
        }
        if not hasattr(self, "cross"):
            if named := [name for name, there in given.items() if there]:
                raise ValueError(
                    f"this DecoderBlock has no cross-attention, but was given {named[0]}; leave it out, "
                    "or build the block with a memory_dim."
                )
        super()._check(projected, memories, memory_masks)


def _ordered(mask: Any, before: Int[Array, "..."] | None, queries: int) -> Mask:
    """The mask of self-attention; causal where none is named, after ``before`` earlier positions."""
    if mask is None:
        return masks.causal(offset=before)
    mask = masks.as_mask(mask)
    if _leaves_order_open(mask, queries):
        raise ValueError(
            "mask of causal self-attention does not say whether later positions may be read; expected "
            "masks.causal() & mask, or masks.window(None, None) & mask where they may."
        )
    return mask


def _leaves_order_open(mask: Mask, queries: int) -> bool:
    """Whether nothing in it but padding and packing tells queries apart."""

    def is_open(term: Any) -> bool:
        if isinstance(term, masks.AnyOf):
            return all(_leaves_order_open(part, queries) for part in term.masks)
        if isinstance(term, masks.Explicit):
            return term.allowed.shape[-2] == 1 < queries
        return isinstance(term, masks.KeyPadding | masks.Lengths | masks.Segments)

    return all(is_open(term) for term in mask.terms)
