"""Transformer blocks: named residual sublayers, which read nothing, ``x`` itself or a named memory.

The encoder block, the decoder block and any other are compositions of one ``Block``. Its arguments give
the order of the sublayers, and the names of their parameters.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from flax import nnx

from crossattn.nn.attention import MultiHeadAttention
from crossattn.nn.chunked import ChunkedAttention
from crossattn.nn.edits import edited, hand_out
from crossattn.nn.encoded import Encoded
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.sublayers import ITSELF, BlockConfig, Sublayer, split
from crossattn.ops import masks
from crossattn.ops.arguments import in_words_of_here, refuse_vectors
from crossattn.ops.exporting import exportable
from crossattn.ops.masks import Mask
from crossattn.ops.memory import Memory
from crossattn.types import Array, Bool, Float, Int, Key


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockState:
    """The state of a block: projected memories, a cache and captured activations.

    Attributes:
      memories: projected memories by the name of the sublayer that reads them.
      cache: the cache of self-attention; None for whole sequences.
      captured: the activations that a call named in ``capture``.
    """

    memories: dict[str, Memory] = field(default_factory=dict)
    cache: Memory | None = None
    captured: dict[str, Any] = field(default_factory=dict)


class Block(nnx.Module):
    """Residual sublayers, one after the other.

    Args:
      scope: the name of self-attention in profiles.
      **sublayers: by name, in order; the parameters of sublayer ``x`` are those of ``x`` and ``x_residual``.

    Raises:
      ValueError: a sublayer has the name of an attribute of a block; or it reads itself with
        attention that only reads memories, such as ``AdditiveAttention``.
    Example: ``Block(attention=config.self_attention(rngs), feedforward=config.feedforward(rngs))``.
    """

    edits: Any = None
    """Interventions by site, ``Edits``, in a copy of a model that ``crossattn.interventions`` made."""
    taps: tuple[tuple[str, str], ...] = ()
    """Sites whose activations calls hand out, and the names of these, in such a copy."""

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
        self._order = tuple(
            (name, (own.reads, own.causal, own.by_position)) for name, own in sublayers.items()
        )
        self.scope = scope

    @property
    def sublayers(self) -> dict[str, Sublayer]:
        """The sublayers by name, in order."""
        return {
            name: Sublayer(getattr(self, name), getattr(self, f"{name}_residual"), *how)
            for name, how in self._order
        }

    @property
    def readers(self) -> dict[str, str]:
        """The sublayers that read memories, with the names of these memories."""
        return {name: reads for name, (reads, *_) in self._order if reads not in (None, ITSELF)}

    @property
    def by_position(self) -> bool:
        """Whether a sublayer reads a memory by the positions of the tokens in their text."""
        return any(by_position for _, (*_, by_position) in self._order)

    @property
    def capturable(self) -> list[str]:
        """The names that ``capture`` may have."""
        names = [prefix + name for name, _ in self._order for prefix in ("", "+")]
        attention = [name for name, (reads, *_) in self._order if reads]
        names += [f"{name}.weights" for name in attention]
        names += [f"{name}.heads" for name in attention if self.heads_of(name)]
        whole = [x for x in attention if isinstance(getattr(self, x), MultiHeadAttention)]
        # Statistics know nothing of persistent vectors, which take a part of every query's weights.
        names += [f"{x}.stats" for x in whole if getattr(self, x).persistent is None]
        makes = MultiHeadAttention, ChunkedAttention  # of a Memory
        return names + [f"{x}.values" for x in self.readers if isinstance(getattr(self, x), makes)]

    def heads_of(self, name: str) -> MultiHeadAttention | None:
        """Returns the multi-head attention of a sublayer, itself or a part of it; None is another kind."""
        inner = getattr(self, name)
        inner = getattr(inner, "attention", inner)
        return inner if isinstance(inner, MultiHeadAttention) else None

    @in_words_of_here
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
        text_positions: Int[Array, "*#B T"] | None = None,
        bias: Float[Array, "..."] | None = None,
        condition: Float[Array, "*B C"] | None = None,
        capture: Collection[str] = (),
    ) -> tuple[Float[Array, "*B T D"], BlockState | None]:
        """Computes [*B T D] -> [*B T D], and the state with its cache extended and the captured activations.

        Args:
          x: [*B T D]; or [T D], shared by all examples of the memories, such as a Perceiver's latents.
          state: memories that ``read`` has projected, and a cache for sequences that come piece by piece;
            None is neither.
          key: turns dropout on.
          memories: by name, ``Encoded``, vectors [*B S M], or a ``Memory`` that is projected already (by
            ``memory`` of the sublayer with ``values_of``, for example), for the sublayers whose memories are
            not in the state.
          mask: the whole mask of self-attention: ``causal() & segments(s)``, ``causal() | prefix(n)``,
            ``window(None, None) & key_padding(valid)`` to read later positions too. None is causal where
            the sublayer is, and everything where it is not. In causal sublayers, bands without offset or
            positions count from the end of the cache.
          memory_masks: by the name of a memory, the mask of attention to it, besides its padding mask.
          positions: of the tokens, for rotary positions; None continues those of the cache, or is ``arange``.
          text_positions: of the tokens in their text, for sublayers ``by_position``; None is a whole text.
          bias: added to the logits of self-attention.
          condition: a vector of each example for blocks with a ``condition_dim``; see ``Residual``.
          capture: activations to keep in the state, of a sublayer NAME: "NAME" is its output [*B T D];
            "+NAME" is ``x`` after it; "NAME.weights" are attention's weights [*B N T S] before dropout, and
            [*B N T (S P)] with P persistent vectors, which stand last; "NAME.heads" are what heads read
            [*B T N Hv], before the projection that adds them up; "NAME.values" are the values of the memory
            [*B S K Hv]; "NAME.stats" are ``attention_stats``, which need no matrix of weights.

        Raises:
          ValueError: a sublayer's memory is neither in the state nor among the memories, or the state has
            one that no sublayer reads, or a cache that several would share; a sublayer ``by_position`` gets
            a part of a text without its positions; ``capture`` or
            ``memory_masks`` has a name that the block does not know; a causal sublayer's mask leaves
            open whether later positions may be read; or as ``Residual`` does.
        """
        refuse_vectors(
            "Block: state", state, 'for block(x, memory) write memories={"source": memory}'
        )
        check_names([self], capture, memory_masks)
        projected, memories = {} if state is None else state.memories, memories or {}
        cache, passed = None if state is None else state.cache, {}
        self._check(projected, memories, cache)
        edits = {} if self.edits is None else self.edits.get_value()
        kept = {*capture, *(site for site, _ in self.taps)}

        def at(site: str, x: Array) -> Array:
            """Edits the activation of a site, and keeps it if it is captured."""
            x = edited(site, x, edits.get(site))
            if site in kept:
                passed[site] = x
            return x

        keys = split(key, 2 * len(self._order))
        for (name, own), inner_key, outer_key in zip(
            self.sublayers.items(), keys[::2], keys[1::2], strict=True
        ):
            weighed, heads = f"{name}.weights" in kept, f"{name}.heads"
            options: dict[str, Any] = dict(dropout_key=inner_key, return_weights=weighed)
            if heads in edits or heads in kept:
                options["edit"] = partial(at, heads)
            if (stats := f"{name}.stats") in kept:
                options["watch"] = partial(passed.__setitem__, stats)
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
                if own.by_position:
                    options["positions"] = text_positions
                    if text_positions is None and cache is not None:
                        raise ValueError(
                            f"{name} reads {own.reads!r} by position, and the state has a cache, so that "
                            "x may be a part of a text; give text_positions=."
                        )
                memory = projected.get(name)
                memory = self._memory(name, memories[own.reads]) if memory is None else memory
                if f"{name}.values" in kept:
                    passed[f"{name}.values"] = memory.values
                with jax.named_scope("cross_attention"):
                    update = own.inner(
                        hidden, memory, (memory_masks or {}).get(own.reads), **options
                    )
            if weighed:
                update, passed[f"{name}.weights"] = update
            update = at(name, update)
            x = at(f"+{name}", own.residual.add_residual(x, update, outer_key, condition))
        alone = {name: jax.tree.map(lambda x: x[None], passed[site]) for site, name in self.taps}
        hand_out(alone)
        if state is None and not capture:
            return x, None
        captured = {name: passed[name] for name in passed if name in capture}
        return x, BlockState(memories=projected, cache=cache, captured=captured)

    @on_any_mesh
    def read(self, memories: Mapping[str, Any]) -> BlockState:
        """Projects the memories for each sublayer that reads one.

        Args:
          memories: ``Encoded``, vectors [*B S M] or a ``Memory`` that is projected already, by name.
        """
        return BlockState(
            memories={
                name: self._memory(name, memories[reads])
                for name, reads in self.readers.items()
                if reads in memories
            }
        )

    def _memory(self, name: str, vectors: Any) -> Any:
        """Projects a memory for the sublayer of that name."""
        memory = _read(getattr(self, name), vectors)
        edit = None if self.edits is None else self.edits.get_value().get(f"{name}.values")
        if edit is None:
            return memory
        return replace(memory, values=edited(f"{name}.values", memory.values, edit))

    def cache(self, batch_shape: tuple[int, ...], size: int) -> Memory | None:
        """Returns an empty cache of ``size`` slots for self-attention; None for a block without it.

        Raises:
          ValueError: several sublayers of self-attention would share it.
        """
        own = self._self_attention()
        return getattr(self, own[0]).cache(batch_shape, size) if own else None

    def _self_attention(self) -> list[str]:
        """Returns the name of the sublayer that has the state's cache, if there is one."""
        own = [name for name, (reads, *_) in self._order if reads == ITSELF]
        if len(own) > 1:
            raise ValueError(
                f"the state has one cache, and this {type(self).__name__} has {len(own)} sublayers of "
                f"self-attention, {', '.join(own)}; expected one: put them in blocks of their own."
            )
        return own

    def _check(self, projected: Mapping, memories: Mapping, cache: Memory | None) -> None:
        """Checks that each reader has a memory, and each projected memory a reader."""
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


def check_names(
    blocks: Sequence[Block], capture: Collection[str], memory_masks: Mapping[str, Any] | None
) -> None:
    """Checks that one of the blocks at least knows each name.

    Raises:
      ValueError: ``capture`` names what no block has, or a mask is of a memory that no block reads.
    """
    known = dict.fromkeys(name for block in blocks for name in block.capturable)
    if unknown := [name for name in capture if name not in known]:
        raise ValueError(f"capture names {unknown[0]!r}; expected of {', '.join(known)}.")
    read = dict.fromkeys(name for block in blocks for name in block.readers.values())
    if unread := [name for name in memory_masks or {} if name not in read]:
        raise ValueError(
            f"memory_masks has a mask of {unread[0]!r}, a memory that no layer reads; expected of "
            f"{', '.join(read) or 'none'}."
        )


def _read(attention: Any, memory: Any) -> Any:
    """Projects ``Encoded`` or bare vectors by ``attention``; a ``Memory`` is projected already."""
    if isinstance(memory, Memory):
        return memory
    if isinstance(memory, Encoded):
        return attention.memory(memory.vectors, valid=memory.valid, positions=memory.positions)
    return attention.memory(memory)


class EncoderBlock(Block):
    """Self-attention, then feed-forward, unless the config has no size of it."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        sublayers = {"attention": config.self_attention(rngs)}
        if config.mlp.hidden is not None:
            sublayers["feedforward"] = config.feedforward(rngs)
        super().__init__(scope="encoder_attention", **sublayers)


class DecoderBlock(Block):
    """Masked self-attention, cross-attention (unless ``memory_dim`` is None), feed-forward.

    Self-attention is causal unless a call names another mask; cross-attention reads "source". A config
    without the size of feed-forward has none.

    Source: Vaswani et al. 2017, figure 1.
    """

    def __init__(self, config: BlockConfig, memory_dim: int | None, *, rngs: nnx.Rngs):
        sublayers = {"attention": config.self_attention(rngs, causal=True)}
        if memory_dim is not None:
            sublayers["cross"] = config.cross_attention(rngs, memory_dim=memory_dim)
        if config.mlp.hidden is not None:
            sublayers["feedforward"] = config.feedforward(rngs)
        super().__init__(scope="decoder_attention", **sublayers)


def _ordered(mask: Any, before: Int[Array, "..."] | None, queries: int) -> Mask:
    """Returns the mask of causal self-attention; None is causal, after ``before`` earlier positions."""
    if mask is None:
        return masks.causal(offset=before)
    mask = masks.as_mask(mask)
    if _leaves_order_open(mask, queries):
        raise ValueError(
            "mask of causal self-attention leaves open whether later positions may be read; expected "
            "masks.causal() & mask, or masks.window(None, None) & mask where they may."
        )
    return mask if before is None else _after(mask, before)


def _after(mask: Mask, before: Int[Array, "..."]) -> Mask:
    """Returns the mask of queries after ``before`` earlier positions, where it says none of its own."""

    def moved(term: Any) -> Any:
        if isinstance(term, masks.AnyOf):
            return masks.AnyOf(tuple(_after(part, before) for part in term.masks))
        if isinstance(term, masks.Not):
            return masks.Not(_after(term.mask, before))
        if not isinstance(term, masks.Band):
            return term
        placed = (term.q_positions, term.k_positions, term.offset)
        return replace(term, offset=before) if all(x is None for x in placed) else term

    return Mask(tuple(map(moved, mask.terms)))


def _leaves_order_open(mask: Mask, queries: int) -> bool:
    """Returns whether padding and packing alone tell queries apart."""

    def is_open(term: Any) -> bool:
        if isinstance(term, masks.AnyOf):
            return all(_leaves_order_open(part, queries) for part in term.masks)
        if isinstance(term, masks.Explicit):
            return term.allowed.shape[-2] == 1 < queries
        if isinstance(term, masks.Not):
            return _leaves_order_open(term.mask, queries)
        return isinstance(term, masks.KeyPadding | masks.Lengths | masks.Segments)

    return all(is_open(term) for term in mask.terms)
