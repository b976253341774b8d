"""Pretrained weights in and out: checkpoints as Hugging Face ``transformers`` writes them."""

from crossattn.weights import deltas
from crossattn.weights.formats.safetensors import CheckpointError
from crossattn.weights.formats.tensors import Tensors
from crossattn.weights.labels import shift_right
from crossattn.weights.pretrained import (
    Pretrained,
    describe,
    describe_folder,
    load,
    save,
    tensor_types,
)
from crossattn.weights.quantize import quantize
from crossattn.weights.tokenizers.languages import with_language
from crossattn.weights.warm_start import warm_start

__all__ = [
    "CheckpointError",
    "Pretrained",
    "Tensors",
    "deltas",
    "describe",
    "describe_folder",
    "load",
    "quantize",
    "save",
    "shift_right",
    "tensor_types",
    "warm_start",
    "with_language",
]
