"""Transformer blocks: named residual sublayers, each of which reads nothing, ``x`` itself or a named memory.

The encoder block, the decoder block and any other are compositions of one ``Block``. The order of its
sublayers is that of its arguments, and their names are those of the parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from crossattn.nn.encoded import Encoded
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.sublayers import ITSELF, BlockConfig, Sublayer, split
from crossattn.ops import masks
from crossattn.ops.exporting import exportable
from crossattn.ops.masks import Mask
from crossattn.ops.memory import Memory
from crossattn.types import Array, Bool, Float, Int, Key


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
        if isinstance(term, masks.Not):
            return _leaves_order_open(term.mask, queries)
        return isinstance(term, masks.KeyPadding | masks.Lengths | masks.Segments)

    return all(is_open(term) for term in mask.terms)
