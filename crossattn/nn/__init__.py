"""Modules: attention, feed-forward, blocks, stacks. Flax NNX, used purely: nothing mutates in a call."""

from crossattn.nn.attention import MultiHeadAttention
from crossattn.nn.blocks import Block, BlockState, DecoderBlock, EncoderBlock
from crossattn.nn.chunked import ChunkedAttention
from crossattn.nn.copying import Copying, CopyOutput
from crossattn.nn.decoding import Autoregressive, DecoderStack
from crossattn.nn.encoded import Encoded
from crossattn.nn.feedforward import FeedForward
from crossattn.nn.images import image_positions
from crossattn.nn.inputs import InputConfig, PositionBias, PositionScheme, TokenInput
from crossattn.nn.layers import Embedding, linear, norm
from crossattn.nn.outputs import ClassOutput, OutputConfig, TokenOutput, VectorOutput, logits_of
from crossattn.nn.patches import PatchEmbedding
from crossattn.nn.persistent import PersistentVectors
from crossattn.nn.positions import LearnedPositions, RelativeBias
from crossattn.nn.readied import for_decoding, in_compute_dtype
from crossattn.nn.recurrent import RecurrentCell, RecurrentStack
from crossattn.nn.recurrent_decoding import RecurrentDecoder, RecurrentStates
from crossattn.nn.scores import AdditiveAttention, LocalAttention, LuongAttention, ScoredAttention
from crossattn.nn.stack import Stack, layer_weights, stack_layers, unstack_layers
from crossattn.nn.states import CachedStates
from crossattn.nn.sublayers import (
    BLOCK_KEYS,
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Residual,
    Sublayer,
)

__all__ = [
    "AdditiveAttention",
    "Autoregressive",
    "AttentionConfig",
    "BLOCK_KEYS",
    "Block",
    "BlockConfig",
    "CachedStates",
    "ChunkedAttention",
    "ClassOutput",
    "CopyOutput",
    "Copying",
    "DecoderBlock",
    "DecoderStack",
    "BlockState",
    "Embedding",
    "Encoded",
    "EncoderBlock",
    "FeedForward",
    "FeedForwardConfig",
    "InputConfig",
    "LearnedPositions",
    "LocalAttention",
    "LuongAttention",
    "MultiHeadAttention",
    "OutputConfig",
    "PatchEmbedding",
    "PersistentVectors",
    "PositionBias",
    "PositionScheme",
    "RecurrentCell",
    "RecurrentDecoder",
    "RecurrentStack",
    "RecurrentStates",
    "RelativeBias",
    "Residual",
    "ScoredAttention",
    "Stack",
    "Sublayer",
    "TokenInput",
    "TokenOutput",
    "VectorOutput",
    "for_decoding",
    "image_positions",
    "in_compute_dtype",
    "layer_weights",
    "linear",
    "logits_of",
    "norm",
    "stack_layers",
    "unstack_layers",
]
