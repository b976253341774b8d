"""An encoder and a decoder of different families, joined by cross-attention: two BERTs, for example.

    source tokens [S] ─► encoder (``Bert``) ─► m [S E] ─► linear, where widths differ ─┐ keys, values
    target tokens [T] ─► decoder (``Decoder``): masked self-attention, then ───────► read ─► logits

    y <- LN(y + Attend(y, y, causal));  y <- LN(y + Attend(y, m));  y <- LN(y + MLP(y))       post-norm, BERT
    y <- y + Attend(LN y, LN y, causal);  y <- y + Attend(LN y, m);  y <- y + MLP(LN y)       pre-norm, GPT-2

Published weights have all but cross-attention and the linear layer.

Source: Rothe et al. 2020, "Leveraging Pre-trained Checkpoints for Sequence Generation Tasks".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.models import bert, decoder
from crossattn.models.bert import Bert, BertConfig
from crossattn.models.decoder import Decoder, DecoderConfig
from crossattn.nn.decoding import Autoregressive
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import pairs
from crossattn.nn.inputs import without_padding
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import logits_of
from crossattn.nn.states import CachedStates, check_rows
from crossattn.nn.sublayers import split
from crossattn.types import Array, Float, Int, Key

Source = Int[Array, "*B S"] | Float[Array, "*B H W C"]
"""Tokens; or pictures, for a model that reads them."""


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """The shapes of both halves.

    Attributes:
      encoder: of the encoder of the source.
      decoder: of the decoder of the target. A ``memory_dim`` of None is the size of the encoder's
        vectors; a linear layer projects them to any other.
    """

    encoder: BertConfig
    decoder: DecoderConfig


def tiny(**changes: Any) -> EncoderDecoderConfig:
    """Returns a small configuration for tests."""
    reader, writer = bert.tiny(masked_lm=False), decoder.tiny(memory_dim=32)
    return replace(EncoderDecoderConfig(reader, writer), **changes)


def example(config: EncoderDecoderConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    return pairs(rows, config.encoder.vocab_size, config.decoder.vocab_size, padding)


class EncoderDecoder(Autoregressive):
    """Source tokens and target tokens in, logits of the next target token out, as in ``Transformer``.

    Args:
      config: the shapes.
      build_encoder: makes the encoder of its config; a subclass with another one than ``Bert``
        overrides ``encode``.
    """

    def __init__(self, config: Any, *, build_encoder: Callable[..., Any] = Bert, rngs: nnx.Rngs):
        self.encoder = build_encoder(config.encoder, rngs=rngs)
        size = config.encoder.block.dim
        wanted = config.decoder.memory_dim or size
        self.decoder = Decoder(replace(config.decoder, memory_dim=wanted), rngs=rngs)
        self.bridge = (
            None
            if size == wanted
            else linear(size, wanted, in_axes=("embed",), out_axes=("mlp",), rngs=rngs)
        )

    @property
    def target_input(self) -> Any:
        """The ``TokenInput`` of the decoder."""
        return self.decoder.input

    @property
    def output(self) -> Any:
        """The ``TokenOutput`` of the decoder."""
        return self.decoder.output

    @property
    def longest(self) -> tuple[int | None, int | None]:
        """The largest numbers of source and target tokens that have positions; None is unlimited."""
        return self.encoder.input.longest, self.target_input.longest

    @property
    def pad_id(self) -> int | None:
        """The padding token of sources, if the encoder's config has one."""
        return self.encoder.pad_id

    @on_any_mesh
    def encode(
        self,
        source: Int[Array, "*B S"],
        segment_ids: Int[Array, "*B S"] | None = None,
        positions: Int[Array, "*#B S"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Encodes the source to vectors [*B S M] of the size that the decoder reads."""
        return self.bridged(self.encoder.encode(source, segment_ids, positions, key))

    def bridged(self, encoded: Encoded) -> Encoded:
        """Projects the encoder's vectors to the size that the decoder reads."""
        if self.bridge is None:
            return encoded
        return replace(encoded, vectors=self.bridge(jnp.asarray(encoded.vectors)))

    @on_any_mesh
    def hidden(
        self,
        source: Source,
        target_in: Int[Array, "*B T"],
        *,
        source_segment_ids: Int[Array, "*B S"] | None = None,
        target_segment_ids: Int[Array, "*B T"] | None = None,
        source_positions: Int[Array, "*#B S"] | None = None,
        target_positions: Int[Array, "*#B T"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "L *B N T S"] | None]:
        """Computes the decoder's last vectors and the attention weights; see ``Transformer.hidden``."""
        source_segment_ids = without_padding(source, source_segment_ids, self.pad_id)
        keys = split(key, 2)
        result = self.decoder.hidden(
            target_in,
            memory=self.encode(source, source_segment_ids, source_positions, keys[0]),
            memory_segment_ids=source_segment_ids,
            segment_ids=target_segment_ids,
            positions=target_positions,
            key=keys[1],
            return_weights=return_weights,
        )
        return result if return_weights else (result, None)

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits [*B T V] of the token after each of ``target_in``; the arguments of ``hidden``."""

    @on_any_mesh
    def prefill(
        self,
        batch: int,
        num_beams: int,
        cache_length: int,
        *,
        source: Source,
        source_segment_ids: Int[Array, "B S"] | None = None,
        lookahead: int = 0,
    ) -> CachedStates:
        """Makes decoding states that have read the source; for the other arguments see ``Autoregressive``."""
        encoded = self.encode(source, source_segment_ids)
        check_rows("source", encoded.vectors, batch)
        return self.decoder.prefill(
            batch, num_beams, cache_length, memory=encoded, lookahead=lookahead
        )

    @on_any_mesh
    def decode_hidden(
        self, tokens: Int[Array, "B J T"], states: CachedStates, *, return_weights: bool = False
    ) -> Any:
        """Computes the vectors [B J T D] of ``decode_step`` before its output layer, and the new states."""
        return self.decoder.decode_hidden(tokens, states, return_weights=return_weights)
