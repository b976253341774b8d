"""The decoder-only language model (the GPT shape): the decoder's blocks without cross-attention.

Source: Radford et al. 2019, "GPT-2".
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.models.transformer import with_positions
from crossattn.nn.blocks import BlockConfig, split
from crossattn.nn.decoding import DecoderStack
from crossattn.nn.inputs import PositionScheme, TokenInput
from crossattn.nn.layers import Embedding
from crossattn.types import Array, Float, Int, Key


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder-only model.

    Attributes:
      vocab_size: V.
      block: shape of every block.
      layers: depth, L.
      positions: position scheme.
      max_length: the longest sequence; a hard limit for the "learned" scheme only.
      tie_output: the output layer is the embedding table.
      scan: scan over layers instead of looping.
      remat: recompute activations in the backward pass.
    """

    vocab_size: int
    block: BlockConfig
    layers: int
    positions: PositionScheme = "learned"
    max_length: int = 512
    tie_output: bool = True
    scan: bool = False
    remat: bool = False


def tiny(**changes: Any) -> DecoderConfig:
    """A configuration that compiles and runs in a blink, for tests."""
    block = BlockConfig(dim=32, num_heads=2, mlp_dim=64, activation="gelu")
    return replace(DecoderConfig(vocab_size=64, block=block, layers=2, max_length=64), **changes)


class Decoder(nnx.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        block = with_positions(config.block, config.positions)
        self.input = TokenInput(
            config.vocab_size,
            block.dim,
            positions=config.positions,
            max_length=config.max_length,
            dropout_rate=block.dropout_rate,
            dtype=block.dtype,
            rngs=rngs,
        )
        self.decoder = DecoderStack(
            block,
            config.layers,
            memory_dim=None,
            positions=config.positions,
            scan=config.scan,
            remat=config.remat,
            rngs=rngs,
        )
        self.output = (
            None
            if config.tie_output
            else Embedding(config.vocab_size, block.dim, dtype=block.dtype, rngs=rngs)
        )

    def hidden(
        self,
        tokens: Int[Array, "*B T"],
        *,
        segments: Int[Array, "*B T"] | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*B T D"]:
        """The last vectors, before the output layer."""
        keys = split(key, 2)
        x, _ = self.decoder(
            self.input(tokens, positions, keys[0]),
            self.decoder.no_source(),
            keys[1],
            segments=segments,
            positions=positions,
        )
        return x

    def output_table(self) -> Float[Array, "V D"]:
        """The output layer's weights, one row a token."""
        return self._output_embedding().table[...]

    def logits(self, hidden: Float[Array, "*B T D"]) -> Float[Array, "*B T V"]:
        """The output layer, float32."""
        return self._output_embedding().logits(hidden)

    def _output_embedding(self) -> Embedding:
        return self.input.embedding if self.output is None else self.output

    def __call__(self, tokens: Int[Array, "*B T"], **options: Any) -> Float[Array, "*B T V"]:
        """Logits [*B T V] of the token after each of ``tokens``; options as in ``hidden``."""
        return self.logits(self.hidden(tokens, **options))

    def start(self, batch: int, beams: int, max_length: int) -> Any:
        """Decoding states: empty caches [B, beams, max_length]."""
        return self.decoder.with_caches(self.decoder.no_source(), (batch, beams), max_length)

    def advance(
        self, tokens: Int[Array, "B J T"], states: Any, index: Int[Array, ""]
    ) -> tuple[Float[Array, "B J T D"], Any]:
        """``step`` before its output layer: the vectors from which the next tokens are predicted."""
        positions = index + jnp.arange(tokens.shape[-1])
        return self.decoder.step(self.input(tokens, positions), states, index)

    def step(
        self, tokens: Int[Array, "B J T"], states: Any, index: Int[Array, ""]
    ) -> tuple[Float[Array, "B J T V"], Any]:
        """Logits after the next T tokens of each beam, the first of which is number ``index``."""
        x, states = self.advance(tokens, states, index)
        return self.logits(x), states
