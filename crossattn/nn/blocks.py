"""Transformer blocks: residual sublayers around attention and a feed-forward network.

The encoder block has two sublayers, the decoder block three: masked self-attention, cross-attention,
feed-forward, each with its own parameters. A decoder without a source has no cross-attention.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from crossattn.axes import placed
from crossattn.nn.attention import MultiHeadAttention
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
class BlockConfig:
    """The shape of a block.

    Attributes:
      dim: model size, D.
      num_heads: N.
      mlp_dim: feed-forward size, F.
      num_kv_heads: K; None is N.
      head_dim: H; None is D / N.
      activation: of the feed-forward network.
      norm: "layer" or "rms".
      norm_epsilon: added to the variance.
      norm_first: pre-norm (x + f(norm(x))) or post-norm (norm(x + f(x))).
      use_bias: biases in linear layers.
      key_bias: a bias in the projection of keys; None is ``use_bias``.
      attention_scale: what attention logits are multiplied by; None is ``H ** -0.5``.
      qk_norm: norm on query and key heads.
      rope_base: rotary self-attention; None is none.
      relative_buckets, relative_distance: of the "relative" position scheme, see ``RelativeBias``.
      dropout_rate: on sublayer outputs.
      attention_dropout_rate: on attention weights.
      mlp_dropout_rate: on hidden features of the feed-forward network.
      dtype: computation dtype.
    """

    dim: int
    num_heads: int
    mlp_dim: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    activation: Activation = "relu"
    norm: NormName = "layer"
    norm_epsilon: float = 1e-6
    norm_first: bool = True
    use_bias: bool = True
    key_bias: bool | None = None
    attention_scale: float | None = None
    qk_norm: bool = False
    rope_base: float | None = None
    relative_buckets: int = 32
    relative_distance: int = 128
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    mlp_dropout_rate: float = 0.0
    dtype: Any = None

    def attention(self, rngs: nnx.Rngs, *, rope: bool, memory_dim: int | None = None):
        """An attention layer of this shape."""
        return MultiHeadAttention(
            self.dim,
            self.num_heads,
            memory_dim=memory_dim,
            head_dim=self.head_dim,
            num_kv_heads=self.num_kv_heads,
            use_bias=self.use_bias,
            key_bias=self.key_bias,
            scale=self.attention_scale,
            qk_norm=self.qk_norm,
            rope_base=self.rope_base if rope else None,
            dropout_rate=self.attention_dropout_rate,
            dtype=self.dtype,
            rngs=rngs,
        )

    def position_bias(
        self, positions: PositionScheme, rngs: nnx.Rngs, *, bidirectional: bool
    ) -> PositionBias:
        """The bias that the self-attention layers of a stack of these blocks share."""
        return PositionBias(
            positions,
            self.num_heads,
            buckets=self.relative_buckets,
            max_distance=self.relative_distance,
            bidirectional=bidirectional,
            rngs=rngs,
        )

    def normalise(self, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
        """A norm of this kind."""
        return norm(self.norm, self.dim, epsilon=self.norm_epsilon, dtype=self.dtype, rngs=rngs)

    def feedforward(self, rngs: nnx.Rngs) -> FeedForward:
        """A feed-forward network of this shape."""
        return FeedForward(
            self.dim,
            self.mlp_dim,
            self.activation,
            use_bias=self.use_bias,
            dropout_rate=self.mlp_dropout_rate,
            dtype=self.dtype,
            rngs=rngs,
        )


class Residual(nnx.Module):
    """``x + dropout(f(norm(x)))``, or post-norm, ``norm(x + dropout(f(x)))``.

    Source: Vaswani et al. 2017, section 3.1; pre-norm, Xiong et al. 2020.
    """

    def __init__(self, config: BlockConfig, rngs: nnx.Rngs):
        self.norm = config.normalise(rngs)
        self.norm_first = config.norm_first
        self.dropout_rate = config.dropout_rate

    def enter(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """What the sublayer gets."""
        return self.norm(x) if self.norm_first else x

    def leave(
        self, x: Float[Array, "*B T D"], update: Float[Array, "*B T D"], key: Key[Array, ""] | None
    ) -> Float[Array, "*B T D"]:
        """What the next sublayer gets."""
        x = placed(x + dropout(update, self.dropout_rate, key), "embed")
        return x if self.norm_first else self.norm(x)


def split(key: Key[Array, ""] | None, count: int) -> list[Key[Array, ""] | None]:
    """That many keys, or that many Nones: no key means no dropout."""
    return [None] * count if key is None else list(jax.random.split(key, count))


class EncoderBlock(nnx.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.attention = config.attention(rngs, rope=True)
        self.attention_residual = Residual(config, rngs)
        self.feedforward = config.feedforward(rngs)
        self.feedforward_residual = Residual(config, rngs)

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        state: None = None,
        key: Key[Array, ""] | None = None,
        *,
        mask: Mask | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        bias: Float[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "*B T D"], None]:
        """[*B T D] -> [*B T D]. ``state`` is there for ``Stack``; an encoder has none."""
        keys = split(key, 4)
        with jax.named_scope("encoder_attention"):  # by which a plan finds its kernel
            update = self.attention(
                self.attention_residual.enter(x),
                mask=mask,
                positions=positions,
                bias=bias,
                dropout_key=keys[0],
            )
        x = self.attention_residual.leave(x, update, keys[1])
        update = self.feedforward(self.feedforward_residual.enter(x), keys[2])
        return self.feedforward_residual.leave(x, update, keys[3]), state


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderState:
    """What a decoder block carries besides activations.

    Attributes:
      source: the projected memory that cross-attention reads, or None.
      cache: the self-attention cache, or None when whole sequences are given.
      weights: cross-attention weights [*B N T S] of the last call, when asked for.
    """

    source: Memory | None = None
    cache: Memory | None = None
    weights: Float[Array, "..."] | None = None


class DecoderBlock(nnx.Module):
    """Masked self-attention, cross-attention (unless ``memory_dim`` is None), feed-forward.

    Self-attention is causal unless a call names another mask.

    Source: Vaswani et al. 2017, figure 1.
    """

    def __init__(self, config: BlockConfig, memory_dim: int | None, *, rngs: nnx.Rngs):
        self.attention = config.attention(rngs, rope=True)
        self.attention_residual = Residual(config, rngs)
        alone = memory_dim is None
        self.cross = None if alone else config.attention(rngs, rope=False, memory_dim=memory_dim)
        self.cross_residual = None if alone else Residual(config, rngs)
        self.feedforward = config.feedforward(rngs)
        self.feedforward_residual = Residual(config, rngs)

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        state: DecoderState,
        key: Key[Array, ""] | None = None,
        *,
        mask: Mask | Bool[Array, "..."] | None = None,
        source_mask: Mask | Bool[Array, "..."] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        bias: Float[Array, "..."] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T D"], DecoderState]:
        """[*B T D] -> [*B T D], and the state with its cache extended and its weights filled in.

        Args:
          x: [*B T D].
          state: what cross-attention reads, and a cache where sequences come piece by piece.
          key: turns dropout on.
          mask: of self-attention, the whole of it: ``causal() & segments(s)``, ``causal() | prefix(n)``,
            ``window(None, None) & key_padding(valid)`` to read later positions too. None is causal.
          source_mask: of cross-attention, on top of the validity of what it reads.
          positions: of the tokens, for rotary positions; None is where the cache stands, or ``arange``.
          bias: added to the logits of self-attention.
          return_weights: keep the weights of cross-attention in the state.

        Raises:
          ValueError: the block has cross-attention and the state no source, or the other way round; or
            the mask leaves open whether later positions may be read.
        """
        self._check(state, source_mask, return_weights)
        keys = split(key, 6)
        cache, weights = state.cache, None
        inner = self.attention_residual.enter(x)
        if cache is not None:
            cache = self.attention.extend(cache, inner, positions=positions)
        mask = _ordered(mask, self.attention.before(x, cache), x.shape[-2])
        with jax.named_scope("decoder_attention"):
            update = self.attention(
                inner, cache, mask, positions=positions, bias=bias, dropout_key=keys[0]
            )
        x = self.attention_residual.leave(x, update, keys[1])
        if self.cross is not None:
            with jax.named_scope("cross_attention"):
                update = self.cross(
                    self.cross_residual.enter(x),
                    state.source,
                    source_mask,
                    dropout_key=keys[2],
                    return_weights=return_weights,
                )
            if return_weights:
                update, weights = update
            x = self.cross_residual.leave(x, update, keys[3])
        update = self.feedforward(self.feedforward_residual.enter(x), keys[4])
        x = self.feedforward_residual.leave(x, update, keys[5])
        return x, DecoderState(source=state.source, cache=cache, weights=weights)

    def _check(self, state: DecoderState, source_mask: Any, return_weights: bool) -> None:
        """Cross-attention has something to read; without it there is nothing to read, mask or return."""
        if self.cross is not None:
            if state.source is None:
                raise ValueError(
                    "this DecoderBlock has cross-attention, but its state has no source; give "
                    "DecoderState(source=block.cross.memory(vectors)), or build it with memory_dim=None."
                )
            return
        given = {
            "a source in its state": state.source is not None,
            "a source_mask": source_mask is not None,
            "return_weights": return_weights,
        }
        if named := [name for name, there in given.items() if there]:
            raise ValueError(
                f"this DecoderBlock has no cross-attention, but was given {named[0]}; leave it out, "
                "or build the block with a memory_dim."
            )


def _ordered(mask: Any, before: Int[Array, "..."] | None, queries: int) -> Mask:
    """The mask of self-attention; causal where none is named, after ``before`` earlier positions."""
    if mask is None:
        return masks.causal(offset=before)
    mask = masks.as_mask(mask)
    if _leaves_order_open(mask, queries):
        raise ValueError(
            "mask of a DecoderBlock does not say whether later positions may be read; expected "
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
