"""Writes a run that began from a checkpoint of ``transformers`` as one of theirs again, or a run as a delta.

    python -m experiments.export --workdir=runs/t5 --to=checkpoints/t5
    python -m experiments.export --workdir=runs/t5 --to=checkpoints/t5-best --step=best
    python -m experiments.export --workdir=runs/de --to=deltas/de --delta_of=runs/parent

The folder has weights (safetensors, float32), config, settings of generation and tokenizer; ``xa.load`` and
``transformers`` read it. Of a delta it has ``delta.safetensors``, the parameters that differ from those of a
run or of published weights, with the run's config and assets: the launchers and ``config.init.from`` read it
with its base as the run, and ``xa.load(FILE, base=...)`` reads that of published weights.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from crossattn.functional import flatten
from crossattn.train import processes, workdir
from crossattn.weights import deltas
from experiments import launch
from experiments.runs import BASE, DELTA, MEMBER, STEP, members_of, open_run, parameters_of
from experiments.settings import put

_TO = flags.DEFINE_string("to", None, "The folder, new or empty.")
_DELTA_OF = flags.DEFINE_string(
    "delta_of", None, "Write what differs from this run, or these weights, alone."
)
FLAGS = (launch.WORKDIR, STEP, MEMBER, BASE, _TO, _DELTA_OF)


def main(arguments: Sequence[str]) -> int:
    """Runs the command."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    launch.required_workdir()
    if not _TO.value:
        raise launch.Refused("--to is missing; name the folder to write, --to=checkpoints/NAME.")
    folder = Path(_TO.value)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise launch.Refused(
            f"--to is {folder}, which is there already; name a new or empty folder."
        )
    run, task, params = open_run()
    if task.checkpoint is None and not _DELTA_OF.value:
        raise launch.Refused(
            f"the run in {run} has a model of its own ({task.config.model.name}), which is none of"
            " transformers'; only runs with config.model.name='pretrained' are exported, others as"
            " --delta_of=RUN."
        )
    if processes.is_main():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise launch.Refused(
                f"--to is {folder}, which cannot be made: {error.strerror}."
            ) from None
        launch.writable(folder / "config.json")
        if _DELTA_OF.value:
            print(_write_delta(folder, task, params, _DELTA_OF.value))
            return 0
        print(f"the checkpoint is in {task.checkpoint.export(folder, params)}")
    return 0


def _write_delta(folder: Path, task: Any, params: Any, source: str) -> str:
    """Writes a run as a delta of a source; returns what was written, in words."""
    if members_of(task.config):
        raise launch.Refused("the run is several, trained as one, of which no delta is written.")
    step = task.config.get("init", {}).get("step")
    params, base = jax.device_get((params, parameters_of(source, step)))
    delta = deltas.read(deltas.write(folder / DELTA, params, base))
    task.save_assets(folder / "assets")
    put(task.config, {"init.from": source})
    settings = workdir.flatten(task.config.to_dict())
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return (
        f"the delta is in {folder}: {len(delta.changed)} of {len(flatten(params))} parameters,"
        f" {deltas.share(delta, params):.1%} of the numbers"
    )


if __name__ == "__main__":
    launch.run(main)
