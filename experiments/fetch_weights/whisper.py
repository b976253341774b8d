"""Converts a Whisper of CTranslate2 to a checkpoint of ``transformers``."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.data.whisper_tokens import WhisperTokens
from crossattn.weights.formats import safetensors
from experiments.fetch_weights import ctranslate2

_HEAD_SIZE = 64  # of every released Whisper


def convert(source: Path, target: Path) -> None:
    """Writes the Whisper in a folder of CTranslate2 as a checkpoint folder of ``transformers``."""
    shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")
    tokens = WhisperTokens.load(target)
    tensors = ctranslate2.whisper(ctranslate2.read(source / "model.bin"))
    hints = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for name, content in {
        "config": model_config(tensors, tokens),
        "generation_config": generation_config(tokens, hints["alignment_heads"]),
        "preprocessor_config": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": tensors["model.encoder.conv1.weight"].shape[1],
            "sampling_rate": 16000,
            "hop_length": 160,
            "chunk_length": 30,
            "n_fft": 400,
            "padding_value": 0.0,
            "processor_class": "WhisperProcessor",
        },
        "tokenizer_config": {"tokenizer_class": "WhisperTokenizer"},
    }.items():
        text = json.dumps(content, indent=2) + "\n"
        (target / f"{name}.json").write_text(text, encoding="utf-8")
    safetensors.write(target / safetensors.WEIGHTS, tensors)


def model_config(tensors: dict[str, np.ndarray], tokens: WhisperTokens) -> dict[str, Any]:
    """Returns ``config.json``: sizes from the tensors, ids from the tokenizer."""
    dim, mels, _ = tensors["model.encoder.conv1.weight"].shape
    sizes: dict[str, Any] = {
        "d_model": dim,
        "num_mel_bins": mels,
        "vocab_size": len(tensors["model.decoder.embed_tokens.weight"]),
        "max_source_positions": len(tensors["model.encoder.embed_positions.weight"]),
        "max_target_positions": len(tensors["model.decoder.embed_positions.weight"]),
    }
    sizes |= stack_sizes(tensors, "model.", dim // _HEAD_SIZE, "fc1.bias")
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "scale_embedding": False,
        "torch_dtype": "float32",
        **sizes,
        **_ids(tokens),
    }


def stack_sizes(
    tensors: dict[str, np.ndarray], prefix: str, heads: int, hidden: str
) -> dict[str, int]:
    """Returns the sizes of encoder and decoder; ``hidden`` is a bias of the feed-forward size."""
    sizes = {}
    for side in ("encoder", "decoder"):
        stack = f"{prefix}{side}.layers."
        numbers = [n.removeprefix(stack).split(".")[0] for n in tensors if n.startswith(stack)]
        sizes[f"{side}_layers"] = 1 + max(map(int, numbers))
        sizes[f"{side}_attention_heads"] = heads
        sizes[f"{side}_ffn_dim"] = len(tensors[f"{stack}0.{hidden}"])
    return sizes


def generation_config(tokens: WhisperTokens, heads: list[list[int]]) -> dict[str, Any]:
    """Returns ``generation_config.json``: suppressed tokens, and the heads that give the time."""
    content: dict[str, Any] = {
        **_ids(tokens),
        "alignment_heads": heads,
        "is_multilingual": tokens.multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "no_timestamps_token_id": tokens.no_times,
        "prev_sot_token_id": tokens.previous,
        "return_timestamps": False,
    }
    if tokens.multilingual:
        content["lang_to_id"] = {f"<|{code}|>": id for code, id in tokens.languages.items()}
        content["task_to_id"] = tokens.tasks
    return content


def _ids(tokens: WhisperTokens) -> dict[str, Any]:
    return {
        "bos_token_id": tokens.end,
        "eos_token_id": tokens.end,
        "pad_token_id": tokens.end,
        "decoder_start_token_id": tokens.start,
        "suppress_tokens": list(tokens.suppressed),
        "begin_suppress_tokens": list(tokens.suppressed_first),
    }
