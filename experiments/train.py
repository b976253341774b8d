"""Train the model of a config.

    python -m experiments.train --config=configs/libreoffice.py:fr --workdir=runs/fr
    python -m experiments.train --config=configs/copy_task.py --workdir=runs/copy --config.train.steps=500

The same command again goes on where the run stopped, or says that it is finished.

    python -m experiments.train ... --config.train.seeds=3
    python -m experiments.train ... --sweep="optim.learning_rate=1e-3,2e-3,4e-3;model.dim=64,128"

Seeds, and numbers of the optimiser that change no shape, are trained as one program. Values of another key
are trained one after the other, each in a folder WORKDIR/KEY=VALUE; several keys are combined.
"""

import itertools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from crossattn.data.errors import DataError
from crossattn.train import processes, xla
from crossattn.train.checkpoint import steps_in
from crossattn.train.config import TrainConfig
from crossattn.train.errors import WorkdirMismatch
from crossattn.train.loop import TrainResult, train
from crossattn.train.members import SWEPT
from crossattn.train.optim import make_optimizer
from crossattn.train.program import refuse_offload
from crossattn.train.sharding import make_mesh, row_shares
from crossattn.train.storage import Folder
from crossattn.train.workdir import refuse_unwritable
from crossattn.train.writers import WeightsAndBiases, default_writers
from experiments import flops, launch
from experiments.errors import SettingsError
from experiments.initial import assets_begun_with, initial
from experiments.settings import put, train_config
from experiments.tasks import make_task

_RESUME = flags.DEFINE_enum(
    "resume",
    "auto",
    ["auto", "must", "never"],
    "auto: go on from the newest checkpoint; must: refuse to start anew; never: put an old run aside.",
)


_SWEEP = flags.DEFINE_string(
    "sweep", None, "Train a run with each value: KEY=VALUE,VALUE;KEY=VALUE."
)
_WANDB = flags.DEFINE_string("wandb", None, "Also log to this Weights & Biases project.")
FLAGS = (launch.CONFIG, launch.WORKDIR, _RESUME, _SWEEP, _WANDB, *launch.PROCESSES)


def main(arguments: Sequence[str]) -> int:
    """Trains the model of the command line's config."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    config, workdir = launch.required_config(), launch.required_workdir()
    together, apart = split_sweep(_SWEEP.value.split(";") if _SWEEP.value else [])
    if together:
        with config.unlocked(), config.ignore_type():
            config.train.sweep = ";".join(together)
    if apart:
        for key, values in apart.items():
            for value in values:  # what is wrong with one shows before the first run
                put(ConfigDict(config.to_dict()), {key: value})
        return run_each(apart, together, workdir)
    result = run(config, workdir, _RESUME.value, wandb=_WANDB.value)
    return 130 if result.status == "interrupted" else 0


def split_sweep(sweeps: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the sweeps that one program trains, and the values of the others by their keys.

    Raises:
      Refused: a sweep is not of the form KEY=VALUE,VALUE, or a key is swept twice.
    """
    together, apart = [], {}
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        listed = values.split(",")
        if not (key and equals and all(listed)) or len(set(listed)) < len(listed):
            raise launch.Refused(
                f"--sweep is {sweep!r}; expected KEY=VALUE,VALUE,... with each value once."
            )
        if key in apart or any(other.startswith(f"{key}=") for other in together):
            raise launch.Refused(f"--sweep names {key} twice; give all its values in one.")
        section, _, name = key.partition(".")
        if section == "optim" and name in SWEPT:
            together.append(sweep)
        else:
            apart[key] = listed
    return together, apart


def run_each(apart: Mapping[str, Sequence[str]], together: Sequence[str], workdir: Folder) -> int:
    """Trains each combination of values in a process and a folder of its own; returns the last exit code.

    A run that fails ends the sweep; the same command goes on with it.
    """
    own = ("--sweep", "--workdir", "-sweep", "-workdir")
    words, given = [], iter(sys.argv[1:])
    for word in given:
        if word.partition("=")[0] not in own:
            words.append(word)
        elif "=" not in word:
            next(given, None)
    folders = []
    for values in itertools.product(*apart.values()):
        changed = dict(zip(apart, values, strict=True))
        folders.append(workdir / ",".join(f"{key}={value}" for key, value in changed.items()))
        print(f"training {folders[-1]}", flush=True)
        command = [sys.executable, "-m", "experiments.train", *words, f"--workdir={folders[-1]}"]
        command += [f"--config.{key}={value}" for key, value in changed.items()]
        command += [f"--sweep={';'.join(together)}"] if together else []
        if code := subprocess.run(command).returncode:
            return code
    print(f"compare them: python -m experiments.compare {' '.join(map(str, folders))}", flush=True)
    return 0


def run(
    config: Any, workdir: Folder, resume: str = "auto", wandb: str | None = None
) -> TrainResult:
    """Trains to the end of the schedule; a run in ``workdir`` continues from its newest checkpoint."""
    settings = config.to_dict()
    values = train_config(config, resume)
    refuse_unwritable(workdir)
    # A run that was killed before its first checkpoint begins anew, from ``init.from`` as well.
    begun = resume != "never" and bool(steps_in(workdir / "checkpoints"))
    own = None if resume == "never" else workdir / "assets"
    task = make_task(config, (None if begun else assets_begun_with(config)) or own)
    _refuse_wrong_values(task, values)
    writers = None
    if wandb is not None:
        writers = default_writers(workdir, values.steps)
        writers.append(WeightsAndBiases(workdir, project=wandb, config=settings))
    try:
        result = train(
            task,
            values,
            workdir,
            settings=settings,
            writers=writers,
            initial=None if begun else initial(config, task),
            peak_seconds=flops.at_peak(task, len(values.members)),
        )
    except WorkdirMismatch as error:
        raise WorkdirMismatch(str(error).replace("resume 'never'", "--resume=never")) from None
    if result.status != "interrupted" and processes.is_main():
        print(f"results are in {workdir}", flush=True)
    return result


def _refuse_wrong_values(task: Any, values: TrainConfig) -> None:
    """Refuses wrong data, mesh and optimiser before the run claims its folder."""
    task.refuse_unready()
    if task.config.data.get("splits", {}).get("test", "test") != "test":
        task.corpus.split("test")  # which nothing reads before training has ended
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
