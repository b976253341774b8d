"""The half of a model that generates: a stack of decoder blocks, for whole sequences and step by step.

The encoder-decoder and the decoder-only model share it; the latter has no ``memory_dim``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.nn.blocks import BlockConfig, DecoderBlock
from crossattn.nn.encoded import Encoded
from crossattn.nn.inputs import PositionScheme
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.stack import Stack, layer_weights
from crossattn.nn.states import CachedStates, by_row
from crossattn.ops import beams, masks
from crossattn.types import Array, Float, Int, Key


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
    def read(self, **memories: Encoded) -> Any:
        """Each layer's memory of what it reads, by name, projected once; ``source`` of decoder blocks."""
        return self.stack.map(lambda block: block.read(memories))

    def prefill(self, states: Any, batch: int, num_beams: int, cache_length: int) -> CachedStates:
        """Decoding states of these layer states, with an empty self-attention cache in each layer.

        The sequences of a row share it: [B (cache_length * num_beams) K H].
        """
        size = cache_length * num_beams
        caches = self.stack.map(lambda block: block.attention.cache((batch,), size))
        if isinstance(states, tuple):
            layers: Any = tuple(replace(s, cache=c) for s, c in zip(states, caches, strict=True))
        else:
            layers = replace(states, cache=caches)
        return CachedStates.empty(layers, batch, num_beams, cache_length)

    @on_any_mesh
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        states: Any,
        key: Key[Array, ""] | None = None,
        *,
        segment_ids: Int[Array, "*B T"] | None = None,
        source_segment_ids: Int[Array, "*B S"] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """Whole sequences at once (states without caches)."""
        T = x.shape[-2]
        mask = masks.causal()
        source_mask = None
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
            memory_masks={} if source_mask is None else {"source": source_mask},
            positions=positions,
            bias=self.bias(positions, positions),
            return_weights=return_weights,
        )
        return x if self.norm is None else self.norm(x), states

    @on_any_mesh
    def decode(
        self,
        embed: Callable[[Int[Array, "B J T"], Int[Array, "..."]], Float[Array, "B J T D"]],
        tokens: Int[Array, "B J T"],
        states: CachedStates,
        *,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B J T D"], CachedStates, Float[Array, "L B J N T S"] | None]:
        """The next T positions of each sequence, through the caches; and weights of cross-attention.

        Args:
          embed: makes vectors of tokens and of the positions at which they stand.
        """
        run = partial(self._decode, embed, return_weights)
        return by_row(run, tokens, states) if states.positions.ndim else run(tokens, states)

    def _decode(self, embed: Any, return_weights: bool, tokens: Array, states: CachedStates) -> Any:
        """All rows stand at the same position."""
        (J, T), X = tokens.shape[-2:], states.cache_length
        x = embed(tokens, states.token_positions(T))
        positions = states.positions + jnp.arange(T)
        mask, bias = masks.causal(offset=states.positions), self.bias(positions, jnp.arange(X))
        if states.padding is not None:
            mask = mask & masks.key_padding(jnp.arange(X) >= states.padding[:, None])
        if states.ancestors is not None:
            mask, bias = beams.fold_mask(mask, bias, states.ancestors, T)
        x, layers = self.stack(
            beams.fold(x),
            states.growing(),
            None,
            mask=mask,
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
