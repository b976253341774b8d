"""Train the model of a config.

    python -m experiments.train --config=configs/libreoffice.py:fr --workdir=runs/fr
    python -m experiments.train --config=configs/copy_task.py --workdir=runs/copy --config.train.steps=500

The same command again goes on where the run stopped, or says that it is finished.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from crossattn.data.errors import DataError
from crossattn.train import processes, xla
from crossattn.train.config import TrainConfig
from crossattn.train.errors import WorkdirMismatch
from crossattn.train.loop import TrainResult, train
from crossattn.train.optim import make_optimizer
from crossattn.train.program import refuse_offload
from crossattn.train.sharding import make_mesh, row_shares
from crossattn.train.storage import Folder
from crossattn.train.workdir import refuse_unwritable
from crossattn.train.writers import WeightsAndBiases, default_writers
from experiments import flops, launch
from experiments.errors import SettingsError
from experiments.initial import initial, run_begun_with
from experiments.settings import train_config
from experiments.tasks import make_task

_RESUME = flags.DEFINE_enum(
    "resume",
    "auto",
    ["auto", "must", "never"],
    "auto: go on from the newest checkpoint; must: refuse to start anew; never: put an old run aside.",
)


_WANDB = flags.DEFINE_string("wandb", None, "Also log to this Weights & Biases project.")
FLAGS = (launch.CONFIG, launch.WORKDIR, _RESUME, _WANDB, *launch.PROCESSES)


def main(arguments: Sequence[str]) -> int:
    """Trains the model of the command line's config."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    config, workdir = launch.required_config(), launch.required_workdir()
    result = run(config, workdir, _RESUME.value, wandb=_WANDB.value)
    return 130 if result.status == "interrupted" else 0


def run(
    config: Any, workdir: Folder, resume: str = "auto", wandb: str | None = None
) -> TrainResult:
    """Trains to the end of the schedule; a run in ``workdir`` continues from its newest checkpoint."""
    settings = config.to_dict()
    values = train_config(config, resume)
    refuse_unwritable(workdir)
    begun = resume != "never" and (workdir / "checkpoints").is_dir()
    source = None if begun else run_begun_with(config)
    assets = source or (None if resume == "never" else workdir)
    task = make_task(config, None if assets is None else assets / "assets")
    _refuse_wrong_values(task, values)
    writers = None
    if wandb is not None:
        writers = default_writers(workdir, values.steps)
        writers.append(WeightsAndBiases(project=wandb, config=settings))
    try:
        result = train(
            task,
            values,
            workdir,
            settings=settings,
            writers=writers,
            initial=None if begun else initial(config, task),
            peak_seconds=flops.at_peak(task),
        )
    except WorkdirMismatch as error:
        raise WorkdirMismatch(str(error).replace("resume 'never'", "--resume=never")) from None
    if result.status != "interrupted" and processes.is_main():
        print(f"results are in {workdir}", flush=True)
    return result


def _refuse_wrong_values(task: Any, values: TrainConfig) -> None:
    """Refuses wrong data, mesh and optimiser before the run claims its folder."""
    task.refuse_unready()
    try:
        mesh = make_mesh(values.mesh)
        _refuse_rows(task, values, mesh)
        refuse_offload(values, mesh)
        make_optimizer(values.optim, values.steps, task.logical_axes())
        xla.refuse_unknown(values.xla_flags)
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise SettingsError(f"the config has a value that does not fit: {error}") from error


def _refuse_rows(task: Any, values: TrainConfig, mesh: Any) -> None:
    """Refuses batches whose rows the devices, or their accumulated parts, do not divide."""
    devices = row_shares(mesh)
    sizes = task.batch_rows(devices)
    for what, count in (
        ("mesh.data x mesh.fsdp", devices),
        ("train.accumulate", values.accumulate),
    ):
        if any(size % count for size in sizes):
            made = ", ".join(map(str, sorted(set(sizes))))
            raise SettingsError(
                f"config.data.batch_size is {task.config.data.batch_size}, which makes batches of {made} "
                f"rows; expected multiples of {what}, {count}."
            )


if __name__ == "__main__":
    launch.run(main)
