"""The encoder-decoder Transformer: a decoder reads the encoded source by cross-attention.

    source tokens [S] ─► embed ─► x ─► layers of self-attention ─► norm ─► m [S D] ──┐ keys, values
    target tokens [T] ─► embed ─► y ─► layers: masked self-attention, then ───────► read ─► norm ─► logits

Post-norm, as published (``norm_first=False``):

    x <- LN(x + Attend(x, x));          x <- LN(x + MLP(x))                                  encoder
    y <- LN(y + Attend(y, y, causal));  y <- LN(y + Attend(y, m));  y <- LN(y + MLP(y))      decoder

Pre-norm, the default, with a norm after the last layer:

    x <- x + Attend(LN x, LN x);          x <- x + MLP(LN x)                                 encoder
    y <- y + Attend(LN y, LN y, causal);  y <- y + Attend(LN y, m);  y <- y + MLP(LN y)      decoder

Attend(q, m) = [head_1; ...; head_N] W^O with head_n = softmax(q W^Q_n (m W^K_n)^T / sqrt(H)) m W^V_n. The
three kinds of attention have parameters of their own in every layer, and so have the norms. Rotary, relative
and grouped-head variants come from the blocks.

Source: Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 to 3.3; pre-norm, Xiong et al. 2020,
"On Layer Normalization in the Transformer Architecture".
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.nn.decoding import Autoregressive, DecoderStack
from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import pairs
from crossattn.nn.inputs import InputConfig, PositionScheme, TokenInput, without_padding
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import OutputConfig, TokenOutput, logits_of
from crossattn.nn.stack import encoder_stack, layer_weights
from crossattn.nn.states import CachedStates, check_rows
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.ops import masks
from crossattn.types import Array, Count, Float, Int, Key

Source = Int[Array, "*B S"] | Float[Array, "*B frames M"]
"""Tokens; or features of frames, for a model that reads frames (Whisper)."""


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of an encoder-decoder.

    Attributes:
      vocab_size: target vocabulary, V.
      block: shape of every block.
      encoder_layers, decoder_layers: depth of the encoder, and of the decoder.
      encoder_block: shape of the encoder's blocks; None is ``block``.
      source_vocab_size: vocabulary of the source; None shares the target's and its table.
      separate_inputs: give source and target separate positions and norms with a shared table too.
      positions: position scheme of self-attention.
      max_length: the longest source and target; a hard limit for the "learned" scheme only.
      pad_id: the padding token of sources, which attention masks in calls without segments; None masks
        none.
      input: embeddings of source and target.
      tie_output: the output layer is the target's embedding table.
      output: options of the output layer besides its table.
      scan: scan over layers instead of looping.
      remat: recompute activations in the backward pass; see ``Stack`` for policies by name.
    """

    vocab_size: int
    block: BlockConfig
    encoder_layers: Count
    decoder_layers: Count
    encoder_block: BlockConfig | None = None
    source_vocab_size: int | None = None
    separate_inputs: bool = False
    positions: PositionScheme = "sinusoidal"
    max_length: int = 512
    pad_id: int | None = None
    input: InputConfig = InputConfig()
    tie_output: bool = True
    output: OutputConfig = OutputConfig()
    scan: bool = False
    remat: bool | str = False


def tiny(**changes: Any) -> TransformerConfig:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(dim=32, num_heads=2, mlp_dim=64)
    small = TransformerConfig(vocab_size=64, block=block, encoder_layers=2, decoder_layers=2)
    return replace(small, **changes)


def example(config: TransformerConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    source_vocab = config.source_vocab_size or config.vocab_size
    return pairs(rows, source_vocab, config.vocab_size, padding)


class Transformer(Autoregressive):
    """Source tokens and target tokens in, logits of the next target token out.

    Args:
      config: the shape.
      source_input: embeds a source that is not of tokens; called like a ``TokenInput``, it returns
        vectors of the encoder's size.

    Raises:
      ValueError: a ``source_input`` is given, and the config asks for tokens as source.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        source_input: nnx.Module | None = None,
        rngs: nnx.Rngs,
    ):
        if source_input is not None:
            _check_free(config)
        self.pad_id = config.pad_id
        block = with_positions(config.block, config.positions)
        source_block = with_positions(config.encoder_block or config.block, config.positions)
        inputs: dict[str, Any] = dict(
            positions=config.positions,
            max_length=config.max_length,
            config=config.input,
            dropout_rate=block.dropout_rate,
            dtype=block.dtype,
        )
        layers: dict[str, Any] = dict(scan=config.scan, remat=config.remat)
        self.target_input = TokenInput(config.vocab_size, block.dim, **inputs, rngs=rngs)
        if config.source_vocab_size is not None or config.separate_inputs:
            source_input = TokenInput(
                config.source_vocab_size, source_block.dim, **inputs, rngs=rngs
            )
        self.source_input: Any = source_input
        self.encoder = encoder_stack(source_block, config.encoder_layers, **layers, rngs=rngs)
        self.encoder_bias = source_block.position_bias(config.positions, rngs, bidirectional=True)
        self.encoder_norm = source_block.normalise(rngs) if source_block.norm_first else None
        self.decoder = DecoderStack(
            block,
            config.decoder_layers,
            memory_dim=source_block.dim,
            positions=config.positions,
            **layers,
            rngs=rngs,
        )
        self.output = TokenOutput(
            config.vocab_size, block, config.output, tied=config.tie_output, rngs=rngs
        )

    @property
    def longest(self) -> tuple[int | None, int | None]:
        """The largest numbers of source and target tokens that have positions; None is unlimited."""
        reader = self.target_input if self.source_input is None else self.source_input
        return getattr(reader, "longest", None), self.target_input.longest

    @on_any_mesh
    def encode(
        self,
        source: Source,
        segment_ids: Int[Array, "*B S"] | None = None,
        positions: Int[Array, "*#B S"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Encodes the source to vectors [*B S D]. ``segment_ids`` 0 is padding; ``positions``: ``arange``."""
        segment_ids = without_padding(source, segment_ids, self.pad_id)
        keys, given = split(key, 2), positions
        x = self._embed_source(source, positions, keys[0])
        positions = jnp.arange(x.shape[-2]) if positions is None else positions
        x, _ = self.encoder(
            x,
            key=keys[1],
            mask=None if segment_ids is None else masks.segments(segment_ids),
            positions=positions,
            bias=self.encoder_bias(positions, positions),
        )
        x = x if self.encoder_norm is None else self.encoder_norm(x)
        return Encoded(x, None if segment_ids is None else segment_ids > 0, given)

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
        """Computes the decoder's last vectors, and all cross-attention weights, or None.

        Args:
          source: tokens [*B S].
          target_in: tokens [*B T], beginning-of-sentence first.
          source_segment_ids, target_segment_ids: of the texts packed into a row; 0 is padding.
          source_positions, target_positions: of the tokens; None is ``arange``.
          key: turns dropout on.
          return_weights: return the weights [L *B N T S] of every layer's cross-attention, before dropout.
        """
        source_segment_ids = without_padding(source, source_segment_ids, self.pad_id)
        keys = split(key, 3)
        encoded = self.encode(source, source_segment_ids, source_positions, keys[0])
        return self._decoded(
            encoded,
            target_in,
            source_segment_ids,
            target_segment_ids,
            target_positions,
            keys[1:],
            return_weights,
        )

    def _decoded(
        self,
        encoded: Encoded,
        target_in: Array,
        source_segment_ids: Array | None,
        target_segment_ids: Array | None,
        target_positions: Array | None,
        keys: Any,
        return_weights: bool,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "L *B N T S"] | None]:
        """Computes the results of ``hidden`` from an encoded source."""
        packed = target_segment_ids is not None and source_segment_ids is not None
        if packed:  # The segments of both mask padding too.
            encoded = replace(encoded, valid=None)
        states = self.decoder.read(source=encoded)
        x, states = self.decoder(
            self.target_input(target_in, target_positions, keys[0]),
            states,
            keys[1],
            segment_ids=target_segment_ids,
            source_segment_ids=source_segment_ids if packed else None,
            positions=target_positions,
            capture=self.decoder.reading() if return_weights else (),
        )
        return x, layer_weights(states)

    def _embed_source(self, source: Array, positions: Array | None, key: Array | None) -> Array:
        if self.source_input is None:
            return self.target_input(source, positions, key)
        if isinstance(self.source_input, TokenInput) and self.source_input.embedding is None:
            embedding = self.target_input.embedding
            return self.source_input(source, positions, key, embedding=embedding)
        return self.source_input(source, positions, key)

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
        source: Source | None = None,
        source_segment_ids: Int[Array, "B S"] | None = None,
        encoded: Encoded | Float[Array, "B S D"] | None = None,
        lookahead: int = 0,
    ) -> CachedStates:
        """Makes decoding states that have read the source; for the other arguments see ``Autoregressive``.

        Args:
          source, source_segment_ids: of the encoder; padding has segment 0.
          encoded: the result of ``encode``, or bare vectors, instead of the source.

        Raises:
          ValueError: the source or ``cache_length`` is longer than ``longest``; or there is no source, or
            one without ``batch`` rows.
        """
        if (source is None) == (encoded is None):
            raise ValueError(
                f"prefill got {'both' if encoded is not None else 'neither'} of source and encoded; "
                "expected one of them."
            )
        if source is not None:
            encoded = self.encode(source, source_segment_ids)
        read = Encoded.of(encoded, None if source is not None else source_segment_ids)
        check_rows("source", read.vectors, batch)
        layers = self.decoder.read(source=read)
        return self._filled(layers, batch, num_beams, cache_length, lookahead)


def _check_free(config: TransformerConfig) -> None:
    """Refuses a config that has settings of a source of tokens."""
    asked = {
        "source_vocab_size": config.source_vocab_size is not None,
        "separate_inputs": config.separate_inputs,
        "pad_id": config.pad_id is not None,
    }
    if named := [name for name, there in asked.items() if there]:
        raise ValueError(
            f"got a source_input, and a config with {named[0]}, which a source of tokens needs; expected "
            "one of them."
        )


def with_positions(block: BlockConfig, positions: PositionScheme) -> BlockConfig:
    """Returns the block with rotary self-attention, if the scheme is "rope"."""
    if positions != "rope":
        return block
    return block.changed(rope_base=block.attention.rope_base or 10000.0)
