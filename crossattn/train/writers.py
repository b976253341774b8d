"""Writers of metrics: a JSONL file, TensorBoard, the console, Weights & Biases.

A writer of a resumed run drops its numbers after the step to resume from, so that the log is that of one run.
"""

import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from crossattn.train import processes, storage
from crossattn.train.errors import TrainError, optional
from crossattn.train.storage import Folder

_LOG = logging.getLogger(__name__)


class Writer:
    """Base class of writers, whose methods do nothing."""

    def start(self, step: int) -> None:
        """Begins at a step, 0 for a new run."""

    def tick(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the values of the window so far, after each step."""

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Stores the values of a window of steps, kind "train", or of held-out data, "eval"."""

    def note(self, text: str) -> None:
        """Shows a line for a person."""

    def close(self) -> None:
        """Ends the log."""


class Several(Writer):
    """Several writers on the main process, none on the others."""

    def __init__(self, writers: Sequence[Writer]):
        self._writers = list(writers) if processes.is_main() else []

    def start(self, step: int) -> None:
        for writer in self._writers:
            writer.start(step)

    def tick(self, step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.tick(step, values)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, kind, values)

    def note(self, text: str) -> None:
        for writer in self._writers:
            writer.note(text)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class Jsonl(Writer):
    """File of one JSON object a line: {"step": .., "kind": .., metric: value, ..}; NaN becomes null.

    A store cannot append, and gets the whole file with each line.
    """

    def __init__(self, path: str | Folder):
        self._path = storage.folder(path)
        self._text = ""

    def start(self, step: int) -> None:
        try:
            if self._path.exists():
                self._forget_after(step)
            else:
                self._path.write_text("")
        except OSError as error:
            raise TrainError(f"{self._path} cannot be written: {error.strerror}") from error

    def _forget_after(self, step: int) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        steps = [_step_of(line) for line in lines]
        kept = [
            line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step
        ]
        if lost := steps[:-1].count(None):  # the last may be of a kill
            _LOG.warning("%s: %d damaged lines are left out", self._path, lost)
        self._text = b"".join(kept).decode()
        if kept != lines:
            storage.write_whole(self._path, self._text)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        numbers = {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = json.dumps({"step": step, "kind": kind, **numbers}) + "\n"
        if storage.in_store(self._path):
            self._text += line
            self._path.write_text(self._text)
        else:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)


def _step_of(line: bytes) -> int | None:
    """Returns the step of a line, None if it is cut off or damaged."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


class TensorBoard(Writer):
    """Event files for TensorBoard, through tensorboardX (no TensorFlow)."""

    def __init__(self, directory: str | Folder):
        package = optional(
            "tensorboardX",
            "TensorBoard events need the package tensorboardX: pip install tensorboardX",
        )
        self._make, self._directory = package.SummaryWriter, storage.folder(directory)
        self._events: Any = None

    def start(self, step: int) -> None:
        # TensorBoard hides earlier events at purge_step and after.
        purge: dict[str, Any] = {"purge_step": step + 1} if step else {}
        self._events = self._make(str(self._directory), filename_suffix=f".from-{step}", **purge)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


class WeightsAndBiases(Writer):
    """Run in Weights & Biases; `options` are those of wandb.init (project, name, config, ...).

    A run that goes on is the same run there: its id is kept in `workdir`, if that is given.
    """

    def __init__(self, workdir: str | Folder | None = None, **options: Any):
        self._kept = None if workdir is None else storage.folder(workdir) / "wandb-id.txt"
        self._wandb = optional(
            "wandb", "logging to Weights & Biases needs the package wandb: pip install wandb"
        )
        self._options, self._run = options, None

    def start(self, step: int) -> None:
        again: dict[str, Any] = {}
        if step and self._kept is not None and self._kept.exists():
            again = dict(id=self._kept.read_text(encoding="utf-8"), resume="allow")
        self._run = self._wandb.init(**self._options, **again)
        if self._kept is not None:
            storage.write_whole(self._kept, self._run.id)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class Console(Writer):
    """Progress bar (loss, tokens/s, time left) on a terminal, plain lines elsewhere."""

    def __init__(self, total_steps: int, out: Any = None):
        self._total, self._out = total_steps, out or sys.stdout
        self._bar: Any = None
        self._since = (0, time.perf_counter())

    def start(self, step: int) -> None:
        self._since = (step, time.perf_counter())
        if self._out.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._total, initial=step, unit="step", file=self._out, dynamic_ncols=True
            )

    def tick(self, step: int, values: Mapping[str, float]) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(_summary(values), refresh=False)
            self._bar.update(step - self._bar.n)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        if kind == "eval":
            self.note(f"evaluation at step {step}: {_evaluation(values)}")
        elif self._bar is None:
            first, start = self._since
            left = (time.perf_counter() - start) / max(step - first, 1) * (self._total - step)
            self.note(f"step {step}/{self._total}  {_summary(values)}  {_clock(left)} left")

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._out)
        else:
            print(text, file=self._out, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _summary(values: Mapping[str, float]) -> str:
    speed = values.get("tokens_per_second")
    counted = "" if speed is None else f"  {speed:,.0f} tokens/s"
    return f"loss {values.get('loss', math.nan):.3f}{counted}"


def _evaluation(values: Mapping[str, float]) -> str:
    """Returns the metrics; of members the mean with the least and the greatest."""
    each: dict[str, list[float]] = {}
    for name, value in values.items():
        each.setdefault(name.rpartition("/")[2], []).append(value)
    return "  ".join(
        f"{name} {mean:.4g}" + (f" ({min(own):.4g} to {max(own):.4g})" if own else "")
        for name, (mean, *own) in each.items()
    )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def default_writers(workdir: str | Folder, total_steps: int) -> list[Writer]:
    """Returns the default writers: JSONL, TensorBoard and the console."""
    workdir = storage.folder(workdir)
    return [
        Console(total_steps),
        Jsonl(workdir / "metrics.jsonl"),
        TensorBoard(workdir / "tensorboard"),
    ]
