"""A finished (or unfinished) run as its launchers find it: config, task, parameters."""

from typing import Any

import jax
from absl import flags

from crossattn.train.checkpoint import load_params
from crossattn.train.sharding import make_mesh, params_sharding, with_sharding
from crossattn.train.storage import Folder
from experiments import launch
from experiments.errors import SettingsError
from experiments.settings import check, config_mesh, saved_config
from experiments.tasks import find, make_task

STEP = flags.DEFINE_string("step", "last", "Which checkpoint: a step, 'last' or 'best'.")
SPLIT = flags.DEFINE_string("split", "test", "train, validation or test.")
NUM_BEAMS = flags.DEFINE_integer(
    "num_beams", None, "Beams; 1 is greedy; default: the config's.", lower_bound=1
)


def open_run(*kinds: type) -> tuple[Folder, Any, Any]:
    """(work directory, task, parameters) of the run that the command line names.

    ``--config`` is only needed to evaluate a checkpoint under another config than its own.

    Raises:
      Refused: the task is of none of the kinds that a launcher needs; without any, all will do.
    """
    workdir = launch.required_workdir()
    config = saved_config(workdir) if launch.CONFIG.value is None else launch.CONFIG.value
    check(config)
    if kinds and not issubclass(find(config.task), kinds):
        names = " or ".join(kind.__module__.rpartition(".")[2] for kind in kinds)
        raise launch.Refused(f"the run in {workdir} is a {config.task}, not a {names}.")
    task = make_task(config, workdir / "assets")
    return workdir, task, parameters(task, workdir, STEP.value)


def parameters(task: Any, workdir: Folder, step: str = "last") -> Any:
    """The parameters of one checkpoint of a run, averaged ones where it kept them.

    Over several devices each holds its part, as in training: on the config's mesh, or where that is
    for another number of devices, whole on each, which split the rows.
    """
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    try:
        mesh = config_mesh(task.config)
    except SettingsError:
        raise
    except ValueError:
        mesh = make_mesh()
    target = with_sharding(shapes, params_sharding(shapes, task.logical_axes(), mesh))
    wanted = int(step) if step.isdigit() else step
    params, _ = load_params(workdir / "checkpoints", target, step=wanted)
    return params
