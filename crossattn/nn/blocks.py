"""Transformer blocks: named residual sublayers, each of which reads nothing, ``x`` itself or a named memory.

The encoder block, the decoder block and any other are compositions of one ``Block``. The order of its
sublayers is that of its arguments, and their names are those of the parameters.
"""

from collections.abc import Collection, Mapping
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
      captured: what a call was asked to ``capture``, by name.
    """

    memories: dict[str, Memory] = field(default_factory=dict)
    cache: Memory | None = None
    captured: dict[str, Float[Array, "..."]] = field(default_factory=dict)


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
        if taken := [name for name in names if name == "scope" or hasattr(Block, name)]:
            raise ValueError(
                f"a sublayer is called {taken[0]!r}, as something else of a block is; expected another name."
            )
        for name, sublayer in sublayers.items():
            if sublayer.reads == ITSELF and not hasattr(sublayer.inner, "extend"):
                raise ValueError(
                    f"{name} reads itself, but its {type(sublayer.inner).__name__} has no extend(), which "
                    "self-attention needs; expected MultiHeadAttention, or reads= the name of a memory."
                )
            setattr(self, name, sublayer.inner)
            setattr(self, f"{name}_residual", sublayer.residual)
        self._order = tuple((name, own.reads, own.causal) for name, own in sublayers.items())
        self.scope = scope

    @property
    def sublayers(self) -> dict[str, Sublayer]:
        """Its sublayers by name, in order."""
        return {
            name: Sublayer(getattr(self, name), getattr(self, f"{name}_residual"), reads, causal)
            for name, reads, causal in self._order
        }

    @property
    def readers(self) -> dict[str, str]:
        """Sublayers that read memories, and the names of what they read."""
        return {name: reads for name, reads, _ in self._order if reads not in (None, ITSELF)}

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
        condition: Float[Array, "*B C"] | None = None,
        capture: Collection[str] = (),
    ) -> tuple[Float[Array, "*B T D"], BlockState | None]:
        """[*B T D] -> [*B T D], and the state with its cache extended and what was captured.

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
          condition: what norms and residuals depend on, of blocks with a ``condition_dim``; see ``Residual``.
          capture: what to keep in the state, of a sublayer NAME: "NAME", what it gives [*B T D]; "+NAME",
            ``x`` after it; "NAME.weights", attention's weights [*B N T S]. Names of other blocks do nothing.

        Raises:
          ValueError: a sublayer's memory is neither in the state nor among the memories, or the state has
            one that no sublayer reads, or a cache that several would share; or a causal sublayer's mask
            leaves open whether later positions may be read; or as ``Residual`` does.
        """
        projected, memories = {} if state is None else state.memories, memories or {}
        cache, passed = None if state is None else state.cache, {}
        self._check(projected, memories, cache)
        keys = split(key, 2 * len(self._order))
        for (name, own), inner_key, outer_key in zip(
            self.sublayers.items(), keys[::2], keys[1::2], strict=True
        ):
            weighed = f"{name}.weights" in capture
            options: dict[str, Any] = dict(dropout_key=inner_key, return_weights=weighed)
            hidden = own.residual.pre_norm(x, condition)
            if own.reads is None:
                update = own.inner(hidden, inner_key)
            elif own.reads == ITSELF:
                if cache is not None:
                    cache = own.inner.extend(cache, hidden, positions=positions)
                allowed = mask
                if own.causal:
                    allowed = _ordered(mask, own.inner.before(x, cache), x.shape[-2])
                options |= dict(positions=positions, bias=bias)
                with jax.named_scope(self.scope):  # by which a plan finds its kernel
                    update = own.inner(hidden, cache, allowed, **options)
            else:
                memory = projected.get(name)
                memory = _read(own.inner, memories[own.reads]) if memory is None else memory
                with jax.named_scope("cross_attention"):
                    update = own.inner(
                        hidden, memory, (memory_masks or {}).get(own.reads), **options
                    )
            if weighed:
                update, passed[f"{name}.weights"] = update
            passed[name] = update
            x = passed[f"+{name}"] = own.residual.add_residual(x, update, outer_key, condition)
        if state is None and not capture:
            return x, None
        captured = {name: passed[name] for name in passed if name in capture}
        return x, BlockState(memories=projected, cache=cache, captured=captured)

    @on_any_mesh
    def read(self, memories: Mapping[str, Any]) -> BlockState:
        """A state with each sublayer's memory of what it reads, projected once.

        Args:
          memories: ``Encoded``, or vectors [*B S M], by the names that sublayers read.
        """
        return BlockState(
            memories={
                name: _read(getattr(self, name), memories[reads])
                for name, reads in self.readers.items()
                if reads in memories
            }
        )

    def cache(self, batch_shape: tuple[int, ...], size: int) -> Memory | None:
        """An empty cache of ``size`` slots for self-attention; None where there is none.

        Raises:
          ValueError: several sublayers of self-attention would share it.
        """
        own = self._self_attention()
        return getattr(self, own[0]).cache(batch_shape, size) if own else None

    def _self_attention(self) -> list[str]:
        """The sublayer that has the state's cache, if there is one."""
        own = [name for name, reads, _ in self._order if reads == ITSELF]
        if len(own) > 1:
            raise ValueError(
                f"the state has one cache, and this {type(self).__name__} has {len(own)} sublayers of "
                f"self-attention, {', '.join(own)}; expected one: put them in blocks of their own."
            )
        return own

    def _check(self, projected: Mapping, memories: Mapping, cache: Memory | None) -> None:
        """Attention to a memory has something to read, and what is projected has a reader."""
        readers = self.readers
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
        if cache is not None:
            self._self_attention()


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
