"""Whisper in other libraries, from one checkpoint: ``transformers``, openai-whisper, faster-whisper.

Each function returns ``call(windows [B 3000 M]) -> texts``, greedy, in float32 and without times.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.data.whisper_tokens import WhisperTokens

Call = Callable[[np.ndarray], list[str]]


def installed(peers: dict[str, tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of the peers (module, value) that are installed, and prints the others."""
    for name, (module, value) in peers.items():
        if importlib.util.find_spec(module) is None:
            print(f"{name}: {module} is not installed and left out")
        else:
            yield name, value


def transformers(folder: Path) -> Call:
    """Calls ``WhisperForConditionalGeneration.generate``."""
    import torch
    from transformers import WhisperForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokens = WhisperTokens.load(folder)
    told = {"language": "en"} if tokens.multilingual else {}

    def call(windows):
        features = torch.from_numpy(np.ascontiguousarray(windows.transpose(0, 2, 1)))
        with torch.inference_mode():
            written = model.generate(features, num_beams=1, do_sample=False, **told)
        return [tokens.decode(row) for row in written.tolist()]

    return call


def openai_whisper(folder: Path) -> Call:
    """Calls ``whisper.decode``, with the checkpoint's tensors under its own names."""
    import torch
    import whisper

    model = openai_model(folder)
    options = whisper.DecodingOptions(
        language="en", without_timestamps=True, fp16=False, temperature=0.0
    )

    def call(windows):
        mel = torch.from_numpy(np.ascontiguousarray(windows.transpose(0, 2, 1)))
        results: Any = whisper.decode(model, mel, options)
        return [result.text for result in results]

    return call


def faster_whisper(folder: Path) -> Call:
    """Calls CTranslate2 with the model that the checkpoint was converted from."""
    import ctranslate2
    import faster_whisper

    whisper = faster_whisper.WhisperModel(str(folder), device="cpu", compute_type="float32")
    tokens = WhisperTokens.load(folder)
    prompt = tokens.prefix("en" if tokens.multilingual else None, times=False)

    def call(windows):
        features = np.ascontiguousarray(windows.transpose(0, 2, 1))
        view = ctranslate2.StorageView.from_array(features)
        results = whisper.model.generate(view, [prompt] * len(windows), beam_size=1, max_length=448)
        return [tokens.decode(result.sequences_ids[0]) for result in results]

    return call


def openai_model(folder: Path) -> Any:
    """Builds a model of openai-whisper with the tensors of a ``transformers`` checkpoint."""
    import torch
    from safetensors.torch import load_file
    from whisper.model import ModelDimensions, Whisper

    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Whisper(
        ModelDimensions(
            n_mels=config["num_mel_bins"],
            n_audio_ctx=config["max_source_positions"],
            n_audio_state=config["d_model"],
            n_audio_head=config["encoder_attention_heads"],
            n_audio_layer=config["encoder_layers"],
            n_vocab=config["vocab_size"],
            n_text_ctx=config["max_target_positions"],
            n_text_state=config["d_model"],
            n_text_head=config["decoder_attention_heads"],
            n_text_layer=config["decoder_layers"],
        )
    )
    model.load_state_dict({_openai_name(name): x for name, x in tensors.items()})
    hints = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    heads = torch.zeros(
        config["decoder_layers"], config["decoder_attention_heads"], dtype=torch.bool
    )
    for layer, head in hints["alignment_heads"]:
        heads[layer, head] = True
    model.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return model.eval()


_OPENAI_NAMES = (
    ("model.", ""),
    ("layers.", "blocks."),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("self_attn_layer_norm", "attn_ln"),
    ("final_layer_norm", "mlp_ln"),
    ("encoder_attn.", "cross_attn."),
    ("self_attn.", "attn."),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("out_proj", "out"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
    ("embed_tokens", "token_embedding"),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
)


def _openai_name(name: str) -> str:
    for theirs, ours in _OPENAI_NAMES:
        name = name.replace(theirs, ours)
    return name.replace("embed_positions.weight", "positional_embedding")
