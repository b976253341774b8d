"""Pretrained weights in and out: checkpoints as Hugging Face ``transformers`` writes them."""

from crossattn.weights.labels import shift_right
from crossattn.weights.languages import with_language
from crossattn.weights.pretrained import Pretrained, describe, load, save
from crossattn.weights.quantize import quantize
from crossattn.weights.safetensors import CheckpointError
from crossattn.weights.tensors import Tensors

__all__ = [
    "CheckpointError",
    "Pretrained",
    "Tensors",
    "describe",
    "load",
    "quantize",
    "save",
    "shift_right",
    "with_language",
]
