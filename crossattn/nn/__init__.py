"""Modules: attention, feed-forward, blocks, stacks. Flax NNX, used purely: nothing mutates in a call."""

from crossattn.nn.attention import MultiHeadAttention
from crossattn.nn.blocks import BlockConfig, DecoderBlock, DecoderState, EncoderBlock, Residual
from crossattn.nn.decoding import Autoregressive, DecoderStack
from crossattn.nn.feedforward import FeedForward
from crossattn.nn.inputs import InputConfig, PositionBias, PositionScheme, TokenInput
from crossattn.nn.layers import Embedding, linear, norm
from crossattn.nn.outputs import OutputConfig, TokenOutput
from crossattn.nn.positions import LearnedPositions, RelativeBias
from crossattn.nn.stack import Stack, layer_weights, stack_layers, unstack_layers
from crossattn.nn.states import CachedStates

__all__ = [
    "Autoregressive",
    "BlockConfig",
    "CachedStates",
    "DecoderBlock",
    "DecoderStack",
    "DecoderState",
    "Embedding",
    "EncoderBlock",
    "FeedForward",
    "InputConfig",
    "LearnedPositions",
    "MultiHeadAttention",
    "OutputConfig",
    "PositionBias",
    "PositionScheme",
    "RelativeBias",
    "Residual",
    "Stack",
    "TokenInput",
    "TokenOutput",
    "layer_weights",
    "linear",
    "norm",
    "stack_layers",
    "unstack_layers",
]
