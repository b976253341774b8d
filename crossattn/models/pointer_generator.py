"""The pointer-generator: a Transformer whose next token is generated, or copied from the source.

    source tokens x [S] ─► embed ─► layers of self-attention ─► norm ─► m [S D] ──────┐ keys, values
    target tokens [T] ──► embed ─► e ─► layers: masked self-attention, then ────────► read ─► norm ─► s [T D]
                                                                                      │
    a [T S]  weights of the last layer's reading ◄────────────────────────────────────┘
    p_gen    = sigmoid(w_c . sum_i a_i m_i + w_s . s + w_x . e + b)
    p(w)     = p_gen p_vocab(w) + (1 - p_gen) sum_i a_i [x_i = w]

Both sides share a vocabulary of sub-words, so that every token of the source has a place in p_vocab, and a
rare word is copied piece by piece. ``nn.CopyOutput`` has the mixture; ``attention_sum_reader`` only points.

Source: See et al. 2017, "Get To The Point: Summarization with Pointer-Generator Networks", section 2.2, whose
encoder and decoder are LSTMs.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.models.transformer import Transformer, TransformerConfig
from crossattn.nn.copying import Copying, CopyOutput
from crossattn.nn.examples import pairs
from crossattn.nn.inputs import without_padding
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.states import CachedStates, check_rows
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.types import Array, Count, Float, Int, Key


@dataclass(frozen=True)
class PointerGeneratorConfig(TransformerConfig):
    """The shape of a pointer-generator; sources have the target's vocabulary.

    Attributes:
      copy_heads: heads of the last layer whose mean of weights points; None is all.
    """

    copy_heads: Count | None = 1


def tiny(**changes: Any) -> PointerGeneratorConfig:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(dim=32, num_heads=2, mlp_dim=64)
    small = PointerGeneratorConfig(vocab_size=64, block=block, encoder_layers=2, decoder_layers=2)
    return replace(small, **changes)


def example(config: PointerGeneratorConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    return pairs(rows, config.vocab_size, config.vocab_size, padding)


class PointerGenerator(Transformer):
    """Source tokens and target tokens in, log-probabilities of the next target token out.

    Raises:
      ValueError: the source has a vocabulary of its own, or fewer heads than ``copy_heads`` point.
    """

    def __init__(self, config: PointerGeneratorConfig, *, rngs: nnx.Rngs):
        if config.source_vocab_size is not None:
            raise ValueError(
                f"source_vocab_size is {config.source_vocab_size}; a token that is copied is one of the "
                "target's: expected None, one vocabulary of both sides (tokenizer.joint of a config)."
            )
        cross = config.block.cross or config.block.attention
        if config.copy_heads is not None and config.copy_heads > cross.num_heads:
            raise ValueError(
                f"copy_heads is {config.copy_heads}; the decoder's layers have {cross.num_heads} heads."
            )
        super().__init__(config, rngs=rngs)
        memory_dim = (config.encoder_block or config.block).dim
        self.output = CopyOutput(
            self.output, config.vocab_size, config.block, memory_dim, rngs=rngs
        )
        self.copy_heads = config.copy_heads

    @on_any_mesh
    def hidden(
        self,
        source: Int[Array, "*B S"],
        target_in: Int[Array, "*B T"],
        *,
        source_segment_ids: Int[Array, "*B S"] | None = None,
        target_segment_ids: Int[Array, "*B T"] | None = None,
        source_positions: Int[Array, "*#B S"] | None = None,
        target_positions: Int[Array, "*#B T"] | None = None,
        key: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Copying, Float[Array, "L *B N T S"] | None]:
        """Computes what ``logits`` reads, and all cross-attention weights, or None; see ``Transformer``."""
        source_segment_ids = without_padding(source, source_segment_ids, self.pad_id)
        keys = split(key, 3)
        encoded = self.encode(source, source_segment_ids, source_positions, keys[0])
        x, weights = self._decoded(
            encoded,
            target_in,
            source_segment_ids,
            target_segment_ids,
            target_positions,
            keys[1:],
            return_weights=True,
        )
        read = self.output.read(encoded.vectors)
        hidden = self._copying(x, weights, target_in, source, read)
        return hidden, weights if return_weights else None

    def _copying(
        self, vectors: Array, weights: Any, tokens: Array, source: Array, read: Array
    ) -> Copying:
        points = weights[-1][..., : self.copy_heads, :, :].mean(-3)
        inputs = self.target_input.embedding(tokens)
        return self.output(vectors, points, inputs, source, read)

    @on_any_mesh
    def losses(
        self, hidden: Copying, labels: Int[Array, "B T"], *, chunks: int = 1
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        """Computes -log p of labels and whether each is the likeliest; see ``CopyOutput.losses``."""
        return self.output.losses(hidden, labels, self.target_input.embedding, chunks=chunks)

    def output_table(self) -> Any:
        """Raises ValueError: logits are no product with a table."""
        raise ValueError(
            "the output of a pointer-generator is a mixture, not a product with a table; use losses() or "
            "logits()."
        )

    def output_product(self, hidden: Any) -> Any:
        """Raises ValueError, as ``output_table`` does."""
        return self.output_table()

    @on_any_mesh
    def prefill(
        self,
        batch: int,
        num_beams: int,
        cache_length: int,
        *,
        source: Int[Array, "B S"],
        source_segment_ids: Int[Array, "B S"] | None = None,
        lookahead: int = 0,
    ) -> CachedStates:
        """Makes decoding states that have read the source, whose tokens are copied; see ``Transformer``.

        Raises:
          ValueError: the source or ``cache_length`` is longer than ``longest``, or the source does not have
            ``batch`` rows.
        """
        encoded = self.encode(source, source_segment_ids)
        check_rows("source", encoded.vectors, batch)
        context = {"source": source, "read": self.output.read(encoded.vectors)}
        layers = self.decoder.read(source=encoded)
        return self._filled(layers, batch, num_beams, cache_length, lookahead, context)

    @on_any_mesh
    def decode_hidden(
        self, tokens: Int[Array, "B J T"], states: Any, *, return_weights: bool = False
    ) -> Any:
        """Computes what ``logits`` reads of each of [B J T] tokens, and the new states."""
        x, states, weights = self.decoder.decode(self.embed, tokens, states, return_weights=True)
        source, read = (states.context[name][:, None] for name in ("source", "read"))
        source = jnp.broadcast_to(source, (*tokens.shape[:2], source.shape[-1]))
        hidden = self._copying(x, weights, tokens, source, read)
        return (hidden, states, weights) if return_weights else (hidden, states)
