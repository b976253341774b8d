"""The half of a model that generates: a stack of decoder blocks, for whole sequences and step by step.

The encoder-decoder and the decoder-only model share it; the latter has no ``memory_dim``. Any other period of
blocks is decoded as well, gated ones and ones without self-attention among them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.functional import Build
from crossattn.nn.blocks import DecoderBlock
from crossattn.nn.inputs import PositionScheme
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.stack import Stack, layer_weights
from crossattn.nn.states import CachedStates, by_row
from crossattn.nn.sublayers import BlockConfig
from crossattn.ops import beams, masks
from crossattn.types import Array, Float, Int, Key


class DecoderStack(nnx.Module):
    """Decoder blocks, their position bias and their final norm.

    Args:
      config: shape of the blocks.
      num_layers: L; of a period of several blocks, how often it is repeated.
      memory_dim: size of the source's vectors; None for a decoder without a source.
      build: makes a ``Block`` from ``nnx.Rngs``, or several such for a period of unlike blocks, which may
        read any memories; None is a ``DecoderBlock`` of ``config`` and ``memory_dim``.
      positions: position scheme of the self-attention.
      window: how many positions a token reads, its own among them; None is all before it.
      share, scan, remat: see ``Stack``.

    Raises:
      ValueError: as ``Stack`` does; or there are both ``build`` and ``memory_dim``.
    """

    def __init__(
        self,
        config: BlockConfig,
        num_layers: int,
        *,
        memory_dim: int | None = None,
        build: Build | Sequence[Build] | None = None,
        positions: PositionScheme,
        window: int | None = None,
        share: bool = False,
        scan: bool = False,
        remat: bool | str = False,
        rngs: nnx.Rngs,
    ):
        if build is not None and memory_dim is not None:
            raise ValueError(
                f"got build and memory_dim {memory_dim}, which is of the blocks that are built without one; "
                "leave memory_dim out."
            )
        if build is not None and not callable(build) and len(build) == 1:
            [build] = build
        self.stack = Stack(
            build or (lambda rngs: DecoderBlock(config, memory_dim, rngs=rngs)),
            num_layers,
            share=share,
            scan=scan,
            remat=remat,
            rngs=rngs,
        )
        self.before = None if window is None else window - 1
        self.bias = config.position_bias(positions, rngs, bidirectional=False)
        self.norm = config.normalise(rngs) if config.norm_first else None

    @on_any_mesh
    def read(self, **memories: Any) -> Any:
        """Each layer's memory of what it reads, projected once: ``Encoded`` or vectors [*B S M], by name.

        Raises:
          ValueError: no layer reads a memory of that name.
        """
        names = {name for block in self._kinds() for name in block.memory_names}
        if unread := [name for name in memories if name not in names]:
            raise ValueError(
                f"got the memory {unread[0]!r}, which no layer reads; expected of "
                f"{', '.join(sorted(names)) or 'none'}."
            )
        return self.stack.map(lambda block: block.read(memories))

    def prefill(
        self, states: Any, batch: int, num_beams: int, cache_length: int, context: Any = None
    ) -> CachedStates:
        """Decoding states of these layer states, with an empty cache in each layer with self-attention.

        The sequences of a row share it: [B (cache_length * num_beams) K H].

        Args:
          context: what ``embed`` and ``memory_masks`` of ``decode`` need of each row, arrays [B ...].
        """
        size = cache_length * num_beams
        pairs = zip(self.stack.looped(states), self.stack.blocks(), strict=True)
        layers = tuple(replace(s, cache=block.cache((batch,), size)) for s, block in pairs)
        return CachedStates.empty(layers, batch, num_beams, cache_length, context)

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        states: Any,
        key: Key[Array, ""] | None = None,
        *,
        segment_ids: Int[Array, "*B T"] | None = None,
        source_segment_ids: Int[Array, "*B S"] | None = None,
        memory_masks: Mapping[str, Any] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """Whole sequences at once (states without caches).

        Args:
          x: [*B T D].
          states: what ``read`` gives.
          key: turns dropout on.
          segment_ids: of the texts packed into a row; 0 is padding.
          source_segment_ids: of the memory ``source``.
          memory_masks: of any other, by name, on top of the validity of what is read.
          positions: None is ``arange``.
          return_weights: keep attention's weights in the states, for ``layer_weights``.

        Raises:
          ValueError: weights are asked for where no layer reads a memory; or as ``Block`` does.
        """
        T = x.shape[-2]
        mask = masks.window(self.before)
        source_mask = None
        self._check_weights(return_weights)
        if source_segment_ids is not None:
            source_mask = masks.key_padding(source_segment_ids > 0)
        if segment_ids is not None:
            mask = mask & masks.segments(segment_ids)
            if source_segment_ids is not None:
                source_mask = masks.segments(segment_ids, source_segment_ids)
        positions = jnp.arange(T) if positions is None else positions
        x, states = self.stack(
            x,
            states,
            key,
            mask=mask,
            memory_masks=dict(memory_masks or {})
            | ({} if source_mask is None else {"source": source_mask}),
            positions=positions,
            bias=self.bias(positions, positions),
            return_weights=return_weights,
        )
        return x if self.norm is None else self.norm(x), states

    @on_any_mesh
    def decode(
        self,
        embed: Callable[[Int[Array, "B J T"], Int[Array, "..."], Any], Float[Array, "B J T D"]],
        tokens: Int[Array, "B J T"],
        states: CachedStates,
        *,
        memory_masks: Callable[[Int[Array, "*B T"], Any], Mapping[str, Array]] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The next T positions of each sequence, through the caches: vectors [B J T D], and states.

        With ``return_weights``, the weights [L B J N T S] of the L layers that read a memory too.

        Args:
          embed: makes vectors of tokens, of the positions [T] or [B 1 T] at which they stand in their row's
            text, and of the ``context`` of the states.
          tokens: [B J T].
          states: of ``prefill``.
          memory_masks: makes masks [B 1 T S] of memories, by name, of the positions [T] or [B T] at
            which tokens stand in their row's text, and of the ``context`` of the states.
          return_weights: which to return.

        Raises:
          ValueError: weights are asked for where no layer reads a memory.
        """
        self._check_weights(return_weights)
        run = partial(self._decode, embed, memory_masks, return_weights)
        decoded = by_row(run, tokens, states) if states.positions.ndim else run(tokens, states)
        return decoded if return_weights else decoded[:2]

    def _kinds(self) -> list[Any]:
        """A block of each kind."""
        layers = self.stack.layers
        return list(layers) if isinstance(layers, nnx.List) else [layers]

    def _check_weights(self, return_weights: bool) -> None:
        """Some layer has what is asked for."""
        if return_weights and not any(block.memory_names for block in self._kinds()):
            raise ValueError(
                "return_weights asks for cross-attention, but this decoder reads no memory; leave it out."
            )

    def _decode(
        self,
        embed: Any,
        memory_masks: Any,
        return_weights: bool,
        tokens: Array,
        states: CachedStates,
    ) -> Any:
        """All rows stand at the same position."""
        (J, T), X = tokens.shape[-2:], states.cache_length
        token_positions = states.token_positions(T)
        x = embed(tokens, token_positions, states.context)
        read = {}
        if memory_masks is not None:
            rows = token_positions.reshape(-1, T) if token_positions.ndim > 1 else token_positions
            read = memory_masks(rows, states.context)
            # Queries are folded: all beams of a position, then those of the next.
            read = {name: jnp.repeat(allowed, J, axis=-2) for name, allowed in read.items()}
        positions = jnp.asarray(states.positions) + jnp.arange(T)
        mask = masks.window(self.before, offset=states.positions)
        bias = self.bias(positions, jnp.arange(X))
        if states.padding is not None:
            mask = mask & masks.key_padding(jnp.arange(X) >= states.padding[:, None])
        if states.ancestors is not None:
            mask, bias = beams.fold_mask(mask, bias, states.ancestors, T)
        x, layers = self.stack(
            beams.fold(x),
            states.growing(),
            None,
            mask=mask,
            memory_masks=read,
            positions=jnp.repeat(positions, J),
            bias=bias,
            return_weights=return_weights,
        )
        x = beams.unfold(x if self.norm is None else self.norm(x), J)
        weights = layer_weights(layers)
        weights = None if weights is None else beams.unfold_weights(weights, J)
        return x, states.grown(layers, T), weights


class Autoregressive(nnx.Module):
    """What models that generate have in common: ``decode_hidden`` goes on, ``logits`` is the output layer."""

    @on_any_mesh
    def decode_step(
        self, tokens: Int[Array, "B J T"], states: Any, *, return_weights: bool = False
    ) -> Any:
        """Logits [B J T V] after the next T tokens of each sequence, and the states that have read them.

        With ``return_weights``, the weights [L B J N T S] of cross-attention too.
        """
        hidden, *rest = self.decode_hidden(tokens, states, return_weights=return_weights)
        return self.logits(hidden), *rest


__all__ = ["Autoregressive", "DecoderStack"]
