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


def marian() -> Any:
    """Returns a ``MarianMTModel`` in float32."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    return MarianMTModel(
        MarianConfig(
            vocab_size=VOCABULARY,
            d_model=DIM,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=MLP,
            decoder_ffn_dim=MLP,
            activation_function="relu",
            dropout=DROPOUT,
            attention_dropout=0.0,
            activation_dropout=0.0,
            max_position_embeddings=512,
            pad_token_id=0,
            decoder_start_token_id=1,
            eos_token_id=2,
            scale_embedding=True,
        )
    )
