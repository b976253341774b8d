"""Finds a checkpoint's folder: a local one, or one fetched from the Hugging Face hub."""

import fnmatch
import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from crossattn.weights.formats.safetensors import INDEX, WEIGHTS, CheckpointError
from crossattn.weights.settings import read_settings

# Configs, tokenizers: what lies beside the weights. Never pickles, nor another framework's weights.
_BESIDE = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja")
# For configs that do not name a class. All of these have their output layer.
_CLASSES = {"bert": "BertForPreTraining", "gpt2": "GPT2LMHeadModel"}
_SPEECH, _PAIR = "AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM"
# The name that early files of T5 have for their class, which is no longer there.
_RENAMED = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}


def find_folder(source: str | Path) -> Path:
    """The folder of that path; or of that name on the hub, with the files a checkpoint needs.

    Raises:
      CheckpointError: there is no such folder, and no hub or no such name on it; or its weights are
        pickles.
    """
    folder = Path(source)
    if folder.is_dir():
        refuse_pickles(source, [path.name for path in folder.iterdir()], folder, to=source)
        return folder
    if folder.exists():
        raise CheckpointError(f"{source} is a file; expected the folder that it is in.")
    name = str(source)
    if isinstance(source, Path) or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"there is no folder {source}.")
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"there is no folder {source}; if it is a name on the Hugging Face hub: "
            "pip install 'crossattn[hub]'."
        ) from None
    try:
        return _fetched(huggingface_hub, name)
    except CheckpointError:
        raise
    except Exception as error:  # the hub, the network and the client all have errors of their own
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{name} is neither a folder nor to be had from the hub: {reason}"
        ) from error


def _fetched(hub: Any, name: str) -> Path:
    """The files of a repository that a checkpoint needs; without a network, those that are here."""
    try:
        files = [file for file in hub.list_repo_files(name) if "/" not in file]
    except Exception as unreachable:
        try:
            return Path(hub.snapshot_download(name, local_files_only=True))
        except Exception:
            raise unreachable from None
    if _only_pickles(files):
        folder = Path(hub.snapshot_download(name, allow_patterns=["config.json"]))
        refuse_pickles(name, files, folder, to=name.rpartition("/")[2])
    return Path(hub.snapshot_download(name, allow_patterns=wanted(files)))


def wanted(files: list[str]) -> list[str]:
    """The files to fetch among those at a repository's top: the weights once, configs and tokenizers.

    Variants of the weights (``model.fp16.safetensors``) stay there, and the parts of what is there whole.
    """
    parts = [f for f in fnmatch.filter(files, "*-of-*.safetensors") if f.count(".") == 1]
    beside = [f for f in files if any(fnmatch.fnmatch(f, pattern) for pattern in _BESIDE)]
    return sorted([*beside, *([WEIGHTS] if WEIGHTS in files else parts)])


def _only_pickles(files: Collection[str]) -> list[str]:
    """The pickles among a checkpoint's files, where they hold its weights and no other does."""
    pickled = sorted(fnmatch.filter(files, "pytorch_model*.bin"))
    return pickled if {WEIGHTS, INDEX}.isdisjoint(files) else []


def refuse_pickles(
    source: str | Path, files: Collection[str], folder: Path, *, to: str | Path
) -> None:
    """Refuses a checkpoint that is there as pickles only, with the line that converts it.

    Args:
      source: its folder, or its name on the hub.
      files: its files' names.
      folder: has its ``config.json``; the class that it names decides which output layer survives.
      to: the folder that is to hold the converted checkpoint; its tokenizer too, where that is another.
    """
    if not (pickled := _only_pickles(files)):
        return
    settings = read_settings(folder / "config.json")[1]
    classes = [_model_class(settings)]
    if to != source:
        classes.append("AutoProcessor" if settings["model_type"] == "whisper" else "AutoTokenizer")
    old, new = json.dumps(str(source)), json.dumps(str(to))
    steps = [f"t.{name}.from_pretrained({old}).save_pretrained({new})" for name in classes]
    code = shlex.quote("; ".join(["import transformers as t", *steps]))
    then = f", then load {to}" if to != source else ""
    raise CheckpointError(
        f"{source} has only {pickled[0]}, a pickle, which is never read here; convert it once "
        f"where you trust it{then}: python -c {code}"
    )


def _model_class(settings: dict[str, Any]) -> str:
    listed = settings.get("architectures")
    named = listed[0] if isinstance(listed, list) and listed else ""
    if re.fullmatch(r"[A-Za-z]\w*", str(named), re.ASCII):  # it goes into a command
        return _RENAMED.get(named, named)
    kind = settings["model_type"]
    return _CLASSES.get(kind, _SPEECH if kind == "whisper" else _PAIR)
