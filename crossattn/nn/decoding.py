"""The half of a model that generates: a stack of decoder blocks with its input, output and caches.

The encoder-decoder and the decoder-only model share it; the latter has no ``memory_dim``.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.nn.blocks import BlockConfig, DecoderBlock, DecoderState
from crossattn.nn.inputs import PositionScheme
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.stack import Stack
from crossattn.ops import masks
from crossattn.ops.memory import Memory
from crossattn.types import Array, Bool, Float, Int, Key


class DecoderStack(nnx.Module):
    """Decoder blocks, their position bias and their final norm.

    Args:
      config: shape of the blocks.
      num_layers: L.
      memory_dim: size of the source's vectors; None for a decoder without a source.
      positions: position scheme of the self-attention.
      scan, remat: see ``Stack``.
    """

    def __init__(
        self,
        config: BlockConfig,
        num_layers: int,
        *,
        memory_dim: int | None,
        positions: PositionScheme,
        scan: bool,
        remat: bool | str,
        rngs: nnx.Rngs,
    ):
        self.stack = Stack(
            lambda rngs: DecoderBlock(config, memory_dim, rngs=rngs),
            num_layers,
            scan=scan,
            remat=remat,
            rngs=rngs,
        )
        self.bias = config.position_bias(positions, rngs, bidirectional=False)
        self.norm = config.normalise(rngs) if config.norm_first else None

    @on_any_mesh
    def read(self, source: Float[Array, "*B S M"], valid: Bool[Array, "*B S"] | None = None) -> Any:
        """Each layer's cross-attention memory of the source, projected once."""
        return self.stack.map(
            lambda block: DecoderState(source=block.cross.memory(source, valid=valid))
        )

    def no_source(self) -> Any:
        """Layer states of a decoder that reads nothing but itself."""
        return self.stack.map(lambda block: DecoderState())

    def with_caches(self, states: Any, batch: int, beams: int, length: int) -> Any:
        """The same states with an empty self-attention cache in each layer, for ``length`` positions.

        The beams of a row share it: [B (length * beams) K H].
        """
        caches = self.stack.map(lambda block: block.attention.cache((batch,), length * beams))
        if isinstance(states, tuple):
            return tuple(replace(s, cache=c) for s, c in zip(states, caches, strict=True))
        return replace(states, cache=caches)

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        states: Any,
        key: Key[Array, ""] | None = None,
        *,
        segments: Int[Array, "*B T"] | None = None,
        source_segments: Int[Array, "*B S"] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """Whole sequences at once (states without caches)."""
        T = x.shape[-2]
        mask = masks.causal()
        source_mask = None
        if source_segments is not None:
            source_mask = masks.key_padding(source_segments > 0)
        if segments is not None:
            mask = mask & masks.segments(segments)
            if source_segments is not None:
                source_mask = masks.segments(segments, source_segments)
        positions = jnp.arange(T) if positions is None else positions
        x, states = self.stack(
            x,
            states,
            key,
            mask=mask,
            source_mask=source_mask,
            positions=positions,
            bias=self.bias(positions, positions),
            return_weights=return_weights,
        )
        return x if self.norm is None else self.norm(x), states

    @on_any_mesh
    def step(
        self,
        x: Float[Array, "B J T D"],
        states: Any,
        index: Int[Array, ""],
        *,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B J T D"], Any]:
        """The next T positions, the first of which is number ``index``, through the caches."""
        positions = index + jnp.arange(x.shape[-2])
        size = cache_of(states).size // x.shape[-3]
        x, states = self.stack(
            x,
            states,
            None,
            mask=masks.causal(offset=index),
            positions=positions,
            bias=self.bias(positions, jnp.arange(size)),
            return_weights=return_weights,
        )
        return x if self.norm is None else self.norm(x), states


class StepByStep(nnx.Module):
    """What models that generate have in common: ``advance`` goes on, ``logits`` is the output layer."""

    @staticmethod
    def places(
        tokens: Int[Array, "B J T"], states: Any, index: Int[Array, ""]
    ) -> Int[Array, "*B T"]:
        """Where new tokens stand, each in its own row's sequence, which may begin after padding."""
        places, first = index + jnp.arange(tokens.shape[-1]), cache_of(states).first
        if first is None:
            return places
        first = first if isinstance(states, tuple) else first[0]
        return jnp.maximum(places - first[:, None, None], 0)

    @on_any_mesh
    def step(
        self,
        tokens: Int[Array, "B J T"],
        states: Any,
        index: Int[Array, ""],
        *,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B J T V"], Any]:
        """Logits after the next T tokens of each beam, the first of which is number ``index``."""
        x, states = self.advance(tokens, states, index, return_weights=return_weights)
        return self.logits(x), states


def cache_of(states: Any) -> Memory:
    """The first layer's cache (looped), or all layers' stacked (scanned)."""
    return states[0].cache if isinstance(states, tuple) else states.cache


__all__ = ["DecoderStack", "StepByStep", "cache_of"]
