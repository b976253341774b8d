"""A Whisper that CTranslate2 wrote, as a checkpoint folder of ``transformers``."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.data.whisper_tokens import WhisperTokens
from crossattn.weights.formats import ctranslate2, safetensors

_HEAD_SIZE = 64  # of every released Whisper


def convert(source: Path, target: Path) -> None:
    """Writes the Whisper in a CTranslate2 folder as a checkpoint folder of ``transformers``."""
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
    safetensors.write(target / safetensors.WEIGHTS, tensors, {"format": "pt"})


def model_config(tensors: dict[str, np.ndarray], tokens: WhisperTokens) -> dict[str, Any]:
    """``config.json``: sizes from the tensors, ids from the tokenizer."""
    dim, mels, _ = tensors["model.encoder.conv1.weight"].shape
    sizes: dict[str, Any] = {
        "d_model": dim,
        "num_mel_bins": mels,
        "vocab_size": len(tensors["model.decoder.embed_tokens.weight"]),
        "max_source_positions": len(tensors["model.encoder.embed_positions.weight"]),
        "max_target_positions": len(tensors["model.decoder.embed_positions.weight"]),
    }
    for side in ("encoder", "decoder"):
        layers = [name for name in tensors if name.startswith(f"model.{side}.layers.")]
        sizes[f"{side}_layers"] = 1 + max(int(name.split(".")[3]) for name in layers)
        sizes[f"{side}_attention_heads"] = dim // _HEAD_SIZE
        sizes[f"{side}_ffn_dim"] = len(tensors[f"model.{side}.layers.0.fc1.bias"])
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "scale_embedding": False,
        "torch_dtype": "float32",
        **sizes,
        **_ids(tokens),
    }


def generation_config(tokens: WhisperTokens, heads: list[list[int]]) -> dict[str, Any]:
    """``generation_config.json``: what may not be said, and which heads tell the time."""
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
