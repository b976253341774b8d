"""Hostile settings and hostile records in the folder of a run: done, or one line that says why not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.fuzz import Wrong, launching
from experiments.fuzz.damage import damaged
from experiments.fuzz.launching import TINY, ends_well

ABOUT = "values of settings, and config.json and metrics.jsonl of a run, of any type"
NEEDS = ("hypothesis", "orbax", "grain", "tokenizers")
ENVIRONMENT = launching.ENVIRONMENT

_VALUES = (
    "-1", "0", "1", "3", "7", "-0.5", "0.0", "0.5", "1.5", "nan", "inf", "-inf", "", "None", "True",
    "many", "[]", "{}", "()", "../x", "a b", "\u00e9", "1e400", "0x10", "-7",
)  # fmt: skip
# No run of these could mean anything.
_NEVER_NEGATIVE = {
    "optim.learning_rate", "optim.weight_decay", "optim.clip_norm", "optim.eps", "optim.warmup_steps",
    "model.dropout_rate", "model.attention_dropout_rate", "model.mlp_dropout_rate", "model.dim",
    "model.num_heads", "model.mlp_dim", "model.encoder_layers", "model.decoder_layers", "data.batch_size",
    "data.source_len", "data.target_len", "tokenizer.vocab_size", "train.steps", "train.accumulate",
    "checkpoint.every", "checkpoint.keep", "loss.label_smoothing", "loss.chunks", "loss.z_loss",
    "evaluate.examples", "evaluate.decoding.num_beams", "evaluate.decoding.batch_size",
}  # fmt: skip


def start(folder: Path) -> Callable[[np.random.Generator], None]:
    """One value, or one record of a finished run."""
    whole = launching.tiny_run(folder)
    keys = sorted(json.loads((whole / "config.json").read_text(encoding="utf-8")))

    def case(random: np.random.Generator) -> None:
        run = folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        how = random.random()
        if how < 0.6:
            return _value(random, keys, run)
        shutil.copytree(whole, run)
        (_config if how < 0.8 else _metrics)(random, run)

    return case


def _value(random: np.random.Generator, keys: list[str], run: Path) -> None:
    """A setting with a value that may not fit; a run of two steps where it does."""
    key, value = keys[random.integers(len(keys))], _VALUES[random.integers(len(_VALUES))]
    short = ("--config.train.steps=2", "--config.checkpoint.every=2")
    code, _ = _said(f"--config.{key}={value}", "train", *TINY, *short, f"--config.{key}={value}",
                    f"--workdir={run}")  # fmt: skip
    if not code and key in _NEVER_NEGATIVE and value.startswith("-"):
        raise Wrong(f"--config.{key}={value} is accepted, and trains")


def _config(random: np.random.Generator, run: Path) -> None:
    """``config.json`` is something else; each launcher reads it."""
    from experiments.fuzz.hostile import check_texts

    path, launchers = (
        run / "config.json",
        (("train", *TINY), ("evaluate",), ("translate", "a word")),
    )
    command = launchers[random.integers(len(launchers))]
    whole = path.read_bytes()

    def check(content: bytes) -> None:
        path.write_bytes(content)
        _said(f"config.json that holds {content[:80]!r}", *command, f"--workdir={run}")

    if random.random() < 0.5:
        check(damaged(random, whole)[0])
    else:
        seed = int(random.integers(2**32))
        check_texts(lambda text: check(text.encode("utf-8", "surrogatepass")), seed, most=5)


def _metrics(random: np.random.Generator, run: Path) -> None:
    """``metrics.jsonl`` is damaged; at its end, that stops no resume."""
    path = run / "metrics.jsonl"
    content = path.read_bytes()
    shutil.rmtree(run / "checkpoints" / "12")
    at_end = random.random() < 0.5
    if at_end:
        end = content.rfind(b"\n", 0, -1) + 1
        content = content[:end] + damaged(random, content[end:])[0]
    else:
        content = damaged(random, content)[0]
    path.write_bytes(content)
    code, said = _said("a damaged metrics.jsonl", "train", *TINY, f"--workdir={run}")
    if code and at_end:
        raise Wrong(f"metrics.jsonl damaged in its last line stops the resume: {said}")


def _said(what: str, launcher: str, *arguments: Any) -> tuple[int, str]:
    try:
        return ends_well(launcher, *arguments)
    except Wrong as wrong:
        raise Wrong(f"{what}: {wrong}") from wrong
    except Exception as error:
        raise Wrong(f"{what}: {launcher} ends in a {type(error).__name__}: {error}") from error
