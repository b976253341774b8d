"""Checkpoints that are there as pickles only: refused, with the line that converts them."""

import fnmatch
import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from crossattn.weights.formats.safetensors import INDEX, WEIGHTS, CheckpointError

# For configs that do not name a class. All of these have their output layer.
_CLASSES = {"bert": "BertForPreTraining", "gpt2": "GPT2LMHeadModel"}
_SPEECH, _PAIR = "AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM"
# The name that early files of T5 have for their class, which is no longer there.
_RENAMED = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}


def only_pickles(files: Collection[str]) -> bool:
    """Whether files of these names hold weights as pickles and in no other form."""
    return bool(_pickled(files)) and {WEIGHTS, INDEX}.isdisjoint(files)


def refusal(
    source: str | Path, files: Collection[str], settings: dict[str, Any], to: str | Path
) -> CheckpointError:
    """The error for such a checkpoint: what it has, and how to convert it.

    Args:
      source: its folder, or its name on the hub.
      files: its files' names.
      settings: its ``config.json``; the class that it names decides which output layer survives.
      to: the folder that is to hold the converted checkpoint; its tokenizer too, where that is another.
    """
    classes = [_model_class(settings)]
    if to != source:
        classes.append("AutoProcessor" if settings["model_type"] == "whisper" else "AutoTokenizer")
    old, new = json.dumps(str(source)), json.dumps(str(to))
    steps = [f"t.{name}.from_pretrained({old}).save_pretrained({new})" for name in classes]
    code = shlex.quote("; ".join(["import transformers as t", *steps]))
    then = f", then load {to}" if to != source else ""
    return CheckpointError(
        f"{source} has only {_pickled(files)[0]}, a pickle, which is never read here; convert it once "
        f"where you trust it{then}: python -c {code}"
    )


def _pickled(files: Collection[str]) -> list[str]:
    return sorted(fnmatch.filter(files, "pytorch_model*.bin"))


def _model_class(settings: dict[str, Any]) -> str:
    listed = settings.get("architectures")
    named = listed[0] if isinstance(listed, list) and listed else ""
    if re.fullmatch(r"[A-Za-z]\w*", str(named), re.ASCII):  # it goes into a command
        return _RENAMED.get(named, named)
    kind = settings["model_type"]
    return _CLASSES.get(kind, _SPEECH if kind == "whisper" else _PAIR)
