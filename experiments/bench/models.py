"""An encoder-decoder of this library and a Marian of ``transformers`` with equal sizes."""

from typing import Any

import jax

from crossattn import functional
from crossattn.models import Transformer, TransformerConfig
from crossattn.nn import BlockConfig

VOCABULARY, DIM, HEADS, MLP, LAYERS, DROPOUT = 8000, 256, 4, 1024, 3, 0.1


def ours() -> tuple[Any, Any]:
    """Returns (build, parameters) of our encoder-decoder."""
    block = BlockConfig.of(DIM, HEADS, MLP, dropout_rate=DROPOUT)
    config = TransformerConfig(VOCABULARY, block, LAYERS, LAYERS)

    def build(rngs):
        return Transformer(config, rngs=rngs)

    return build, functional.init(build, jax.random.key(0))


def marian(
    vocabulary: int = VOCABULARY,
    dim: int = DIM,
    heads: int = HEADS,
    mlp: int = MLP,
    layers: int = LAYERS,
    dropout: float = DROPOUT,
) -> Any:
    """Returns a ``MarianMTModel`` in float32."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    return MarianMTModel(
        MarianConfig(
            vocab_size=vocabulary,
            d_model=dim,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=mlp,
            decoder_ffn_dim=mlp,
            activation_function="relu",
            dropout=dropout,
            attention_dropout=0.0,
            activation_dropout=0.0,
            max_position_embeddings=512,
            pad_token_id=0,
            decoder_start_token_id=1,
            eos_token_id=2,
            scale_embedding=True,
        )
    )
