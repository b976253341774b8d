"""Writes a run that began from a checkpoint of ``transformers`` as one of theirs again.

    python -m experiments.export --workdir=runs/t5 --to=checkpoints/t5
    python -m experiments.export --workdir=runs/t5 --to=checkpoints/t5-best --step=best

The folder has weights (safetensors, float32), config, settings of generation and tokenizer; ``xa.load`` and
``transformers`` read it.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from crossattn.train import processes
from experiments import launch
from experiments.runs import MEMBER, STEP, open_run

_TO = flags.DEFINE_string("to", None, "The folder, new or empty.")
FLAGS = (launch.WORKDIR, STEP, MEMBER, _TO)


def main(arguments: Sequence[str]) -> int:
    """Runs the command."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    workdir = launch.required_workdir()
    if not _TO.value:
        raise launch.Refused("--to is missing; name the folder to write, --to=checkpoints/NAME.")
    folder = Path(_TO.value)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise launch.Refused(
            f"--to is {folder}, which is there already; name a new or empty folder."
        )
    _, task, params = open_run()
    if task.checkpoint is None:
        raise launch.Refused(
            f"the run in {workdir} has a model of its own ({task.config.model.name}), which is none of"
            " transformers'; only runs with config.model.name='pretrained' are exported."
        )
    if processes.is_main():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise launch.Refused(
                f"--to is {folder}, which cannot be made: {error.strerror}."
            ) from None
        launch.writable(folder / "config.json")
        print(f"the checkpoint is in {task.checkpoint.export(folder, params)}")
    return 0


if __name__ == "__main__":
    launch.run(main)
