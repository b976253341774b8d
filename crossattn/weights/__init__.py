"""Pretrained weights in and out: checkpoints as Hugging Face ``transformers`` writes them."""

from crossattn.weights.pretrained import Pretrained, describe, load, save
from crossattn.weights.safetensors import CheckpointError

__all__ = ["CheckpointError", "Pretrained", "describe", "load", "save"]
