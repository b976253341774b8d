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

# Configs and tokenizers; never pickles, nor another framework's weights.
_BESIDE = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja")
# Classes with an output layer, for configs that name none.
_CLASSES = {
    "bert": "BertForPreTraining",
    "gpt2": "GPT2LMHeadModel",
    "whisper": "AutoModelForSpeechSeq2Seq",
}
# The name in early files of T5 of a class that is no longer there.
_RENAMED = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}


def find_folder(source: str | Path) -> Path:
    """Returns the folder of that path; or fetches the checkpoint of that name from the hub.

    Raises:
      CheckpointError: there is no such folder, and no hub or no such name on it; or its weights are
        pickles.
    """
    folder = Path(source)
    if folder.is_dir():
        refuse_pickles(source, [path.name for path in folder.iterdir()], folder, to=source)
        return folder
    if folder.is_file() and folder.suffix == ".safetensors":
        raise CheckpointError(
            f"{source} is a file; expected its folder, or for a delta also its base: "
            "xa.load(file, base=...)."
        )
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
    """Fetches the files that a checkpoint needs; without a network, returns those of an earlier time."""
    try:
        files = [file for file in hub.list_repo_files(name) if "/" not in file]
    except Exception as unreachable:
        try:
            return Path(hub.snapshot_download(name, local_files_only=True))
        except Exception:
            raise unreachable from None
    if _pickles(files):
        folder = Path(hub.snapshot_download(name, allow_patterns=["config.json"]))
        refuse_pickles(name, files, folder, to=name.rpartition("/")[2])
    # Variants of the weights (model.fp16.safetensors) stay there, and the parts of a whole file.
    parts = [f for f in fnmatch.filter(files, "*-of-*.safetensors") if f.count(".") == 1]
    patterns = [*_BESIDE, *([WEIGHTS] if WEIGHTS in files else parts)]
    wanted = [file for file in files if any(fnmatch.fnmatch(file, p) for p in patterns)]
    return Path(hub.snapshot_download(name, allow_patterns=wanted))


def _pickles(files: Collection[str]) -> list[str]:
    """Returns the pickles among a checkpoint's files, if no other file has its weights."""
    pickled = sorted(fnmatch.filter(files, "pytorch_model*.bin"))
    return pickled if {WEIGHTS, INDEX}.isdisjoint(files) else []


def refuse_pickles(
    source: str | Path, files: Collection[str], folder: Path, *, to: str | Path
) -> None:
    """Refuses a checkpoint that has pickles only, with the command that converts it.

    The class is that of ``config.json`` in ``folder``; a converted checkpoint in another folder than the
    source also gets the tokenizer.
    """
    if not (pickled := _pickles(files)):
        return
    settings = read_settings(folder / "config.json")[1]
    listed = settings.get("architectures")
    named = str(listed[0]) if isinstance(listed, list) and listed else ""
    if re.fullmatch(r"[A-Za-z]\w*", named, re.ASCII):  # it goes into a command
        classes = [_RENAMED.get(named, named)]
    else:
        classes = [_CLASSES.get(settings["model_type"], "AutoModelForSeq2SeqLM")]
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
