"""BERT: an encoder alone, with the heads that it was trained with.

    tokens [S] ─► embed, + positions, + segment types ─► LN ─► x ─► layers of self-attention ─┐
                    ┌─────────────────────────────────────────────────────────────────────────┘
                    ├─► LN(GELU(linear)) ─► logits of the masked tokens
                    └─► of the first token: tanh(linear) ─► is the second text the next one

    x <- LN(x + Attend(x, x));  x <- LN(x + MLP(x))       post-norm, as published

As a decoder, with or without cross-attention, BERT is a ``Decoder``; both together are an ``EncoderDecoder``.

Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers".
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossattn.nn.encoded import Encoded
from crossattn.nn.examples import texts
from crossattn.nn.inputs import InputConfig, TokenInput, without_padding
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.outputs import OutputConfig, TokenOutput, logits_of
from crossattn.nn.stack import encoder_stack
from crossattn.nn.sublayers import BlockConfig, split
from crossattn.ops import masks
from crossattn.types import AnyArray, Array, Float, Int, Key


@dataclass(frozen=True)
class BertConfig:
    """The shape of a BERT.

    Attributes:
      vocab_size: V.
      block: shape of every block.
      layers: depth, L.
      max_length: the longest text, a hard limit.
      pad_id: the padding token, which attention masks in calls without segments; None masks none.
      input: embeddings; BERT has token types and a norm.
      masked_lm: add the head of masked tokens.
      tie_output: the table of that head is the embedding's.
      pooler: add the layer over the first token's vector.
      next_sentence: add the head of whether text B follows text A; it needs the pooler.
      scan, remat: see ``Stack``.
    """

    vocab_size: int
    block: BlockConfig
    layers: int
    max_length: int = 512
    pad_id: int | None = None
    input: InputConfig = InputConfig(scale=1.0, token_types=2, norm_epsilon=1e-12)
    masked_lm: bool = True
    tie_output: bool = True
    pooler: bool = False
    next_sentence: bool = False
    scan: bool = False
    remat: bool | str = False


def tiny(**changes: Any) -> BertConfig:
    """Returns a small configuration for tests."""
    block = BlockConfig.of(
        dim=32, num_heads=2, mlp_dim=64, activation="gelu_exact", norm_first=False
    )
    return replace(BertConfig(vocab_size=64, block=block, layers=2, max_length=64), **changes)


def example(config: BertConfig, rows: int = 2, padding: int = 0) -> dict[str, Any]:
    """Draws random arguments of a call; see ``Architecture``."""
    tokens, segment_ids = texts(rows, 5, config.vocab_size, padding)
    return dict(tokens=tokens, segment_ids=segment_ids)


class Bert(nnx.Module):
    """Tokens in, their vectors out; or logits of the masked ones."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        block = config.block
        self.pad_id, self.max_length = config.pad_id, config.max_length
        self.input = TokenInput(
            config.vocab_size,
            block.dim,
            positions="learned",
            max_length=config.max_length,
            config=config.input,
            dropout_rate=block.dropout_rate,
            dtype=block.dtype,
            rngs=rngs,
        )
        self.encoder = encoder_stack(
            block, config.layers, scan=config.scan, remat=config.remat, rngs=rngs
        )
        head = OutputConfig(transform=True, bias=True)
        self.output = (
            TokenOutput(config.vocab_size, block, head, tied=config.tie_output, rngs=rngs)
            if config.masked_lm
            else None
        )
        options: dict[str, Any] = dict(in_axes=("embed",), dtype=block.dtype, rngs=rngs)
        self.pooler = (
            linear(block.dim, block.dim, out_axes=("mlp",), **options) if config.pooler else None
        )
        self.next_sentence = (
            linear(block.dim, 2, out_axes=("classes",), **options) if config.next_sentence else None
        )

    @property
    def longest(self) -> tuple[None, int]:
        """None, as there is no source; and the largest number of tokens."""
        return None, self.max_length

    @on_any_mesh
    def encode(
        self,
        tokens: Int[Array, "*B S"],
        segment_ids: Int[Array, "*B S"] | None = None,
        positions: Int[Array, "*#B S"] | None = None,
        key: Key[Array, ""] | None = None,
        *,
        types: Int[Array, "*B S"] | None = None,
    ) -> Encoded:
        """Encodes tokens. ``segment_ids`` 0 is padding; ``types`` is 0 for text A and 1 for text B."""
        segment_ids = without_padding(tokens, segment_ids, self.pad_id)
        keys = split(key, 2)
        x, _ = self.encoder(
            self.input(tokens, positions, keys[0], types=types),
            key=keys[1],
            mask=None if segment_ids is None else masks.segments(segment_ids),
        )
        return Encoded(x, None if segment_ids is None else segment_ids > 0, positions)

    @on_any_mesh
    def hidden(
        self,
        tokens: Int[Array, "*B S"],
        segment_ids: Int[Array, "*B S"] | None = None,
        positions: Int[Array, "*#B S"] | None = None,
        key: Key[Array, ""] | None = None,
        *,
        types: Int[Array, "*B S"] | None = None,
    ) -> Float[AnyArray, "*B S D"]:
        """Computes the vectors of ``encode``, which the output layer reads."""
        return self.encode(tokens, segment_ids, positions, key, types=types).vectors

    @logits_of(hidden)
    def __call__(self) -> Any:
        """Computes logits [*B S V] of each masked token; the arguments of ``hidden``."""

    @on_any_mesh
    def pooled(self, vectors: Float[Array, "*B S D"]) -> Float[Array, "*B D"]:
        """Computes a vector for each text, of its first token.

        Raises:
          ValueError: this BERT has no pooler.
        """
        return jnp.tanh(_present(self.pooler, "pooler")(vectors[..., 0, :]))

    @on_any_mesh
    def follows(self, vectors: Float[Array, "*B S D"]) -> Float[Array, "*B two"]:
        """Computes logits: [..., 0] that text B follows text A, [..., 1] that it does not.

        Raises:
          ValueError: this BERT has no such head.
        """
        return _present(self.next_sentence, "next_sentence")(self.pooled(vectors))

    @on_any_mesh
    def logits(self, vectors: Float[AnyArray, "*B S D"]) -> Float[Array, "*B S V"]:
        """Computes logits of each masked token from the vectors of ``encode``.

        Raises:
          ValueError: this BERT has no such head.
        """
        return _present(self.output, "masked_lm").logits(vectors, self.input.embedding)

    def output_product(
        self, vectors: Float[AnyArray, "*B S D"]
    ) -> tuple[Float[Array, "*B S E"], Float[Array, "V E"]]:
        """Returns vectors and a table, the factors of ``logits``, for losses fused with the softmax."""
        return _present(self.output, "masked_lm").product(vectors, self.input.embedding)


def _present(module: Any, name: str) -> Any:
    if module is None:
        raise ValueError(f"this Bert has no {name}; set {name}=True in its config.")
    return module
