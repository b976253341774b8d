"""Train what a config describes.

    python -m experiments.train --config=configs/libreoffice.py:fr --workdir=runs/fr
    python -m experiments.train --config=configs/copy_task.py --workdir=runs/copy --config.train.steps=500

The same command again goes on where the run stopped, or says that it is finished.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from crossattn.train.errors import WorkdirMismatch
from crossattn.train.loop import TrainResult, train
from experiments import launch
from experiments.settings import train_config
from experiments.tasks import make_task

_RESUME = flags.DEFINE_enum(
    "resume",
    "auto",
    ["auto", "must", "never"],
    "auto: go on from the newest checkpoint; must: refuse to start anew; never: put an old run aside.",
)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    config, workdir = launch.required_config(), Path(launch.required_workdir())
    result = run(config, workdir, _RESUME.value)
    return 130 if result.status == "interrupted" else 0


def run(config: Any, workdir: Path, resume: str = "auto") -> TrainResult:
    """Train to the end of the schedule, from wherever the run in ``workdir`` stands."""
    settings = config.to_dict()
    values = train_config(config, resume)
    assets = None if resume == "never" else workdir / "assets"
    try:
        result = train(make_task(config, assets), values, workdir, settings=settings)
    except WorkdirMismatch as error:
        raise WorkdirMismatch(str(error).replace("resume 'never'", "--resume=never")) from None
    if result.status != "interrupted":
        print(f"results are in {workdir}", flush=True)
    return result


if __name__ == "__main__":
    launch.run(main)
