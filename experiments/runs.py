"""The config, task and parameters of a run, for launchers.

A run is its ``config.json``, its ``assets``, and its ``checkpoints`` or ``delta.safetensors``: what differs
from the parameters of ``config.init.from`` (``experiments.export --delta_of``).
"""

from typing import Any

import jax
from absl import flags

from crossattn import weights
from crossattn.train import storage
from crossattn.train.checkpoint import find_step, load_params
from crossattn.train.members import stacked, take
from crossattn.train.sharding import make_mesh, params_sharding, with_sharding
from crossattn.train.storage import Folder
from experiments import launch
from experiments.errors import SettingsError
from experiments.pretrained import checkpoint_folder
from experiments.settings import check, config_mesh, put, saved_config, train_config
from experiments.tasks import find, make_task

STEP = flags.DEFINE_string("step", "last", "Which checkpoint: a step, 'last' or 'best'.")
SPLIT = flags.DEFINE_string("split", "test", "train, validation or test.")
NUM_BEAMS = flags.DEFINE_integer(
    "num_beams", None, "Beams; 1 is greedy; default: the config's.", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "Of the draw.")
DELTA = "delta.safetensors"
BASE = flags.DEFINE_string(
    "base", None, "Run or weights that --workdir is a delta of; default: what it was exported with."
)
MEMBER = flags.DEFINE_string(
    "member",
    None,
    "Which run of several that were trained as one: its name, seed_1; default: the first.",
)


def open_run(*kinds: type) -> tuple[Folder, Any, Any]:
    """Returns the work directory, task and parameters of the run that the command line names.

    ``--config`` takes the place of the run's config.

    Raises:
      Refused: the task is of none of the given kinds.
    """
    workdir = launch.required_workdir()
    config = saved_config(workdir) if launch.CONFIG.value is None else launch.CONFIG.value
    check(config)
    if kinds and not issubclass(find(config.task), kinds):
        names = " or ".join(kind.__module__.rpartition(".")[2] for kind in kinds)
        raise launch.Refused(f"the run in {workdir} is a {config.task}, not a {names}.")
    if BASE.value:
        if not has_delta(workdir):
            raise launch.Refused(
                f"--base is {BASE.value}, but {workdir} is no delta; leave it out."
            )
        put(config, {"init.from": BASE.value})
    task = make_task(config, workdir / "assets")
    return workdir, task, parameters(task, workdir, STEP.value, MEMBER.value)


def task_of(workdir: Folder) -> Any:
    """Returns the task of a run, with its config and its assets."""
    config = saved_config(workdir)
    check(config)
    return make_task(config, workdir / "assets")


def members_of(config: Any) -> dict[str, int]:
    """Returns the names of the runs that a config trains as one, with their numbers; {} for one run."""
    members = train_config(config).members
    return {member.name: index for index, member in enumerate(members)}


def find_run(source: str) -> Folder | None:
    """Returns the folder of a run, of checkpoints or of a delta; None where the name is none of a run."""
    folder = storage.folder(source)
    return folder if (folder / "checkpoints").is_dir() or has_delta(folder) else None


def has_delta(folder: Folder) -> bool:
    """Returns whether a run has a delta in place of checkpoints."""
    return (folder / DELTA).is_file() and not (folder / "checkpoints").is_dir()


def parameters_of(source: str, step: str | None = None) -> Any:
    """Returns the parameters of a run's checkpoint, or of published weights.

    Raises:
      SettingsError: a step is named, and the source is no run with checkpoints.
    """
    run = find_run(source)
    if run is not None:
        task = make_task(saved_config(run), run / "assets")
        return parameters(task, run, step or "last")
    if step is not None:
        raise SettingsError(
            f"config.init.step is {step!r}, but {source} is no run with checkpoints; leave it none."
        )
    return weights.load(checkpoint_folder(source))[1]


def step_of(workdir: Folder, step: str) -> int | None:
    """Returns the number of the step of a checkpoint, "last" or "best"; None of a delta."""
    return None if has_delta(workdir) else find_step(workdir / "checkpoints", _number(step))


def _number(step: str) -> int | str:
    return int(step) if step.isdigit() else step


def _of_delta(task: Any, workdir: Folder, step: str) -> Any:
    """Returns the parameters that a run's delta makes of those of ``config.init.from``."""
    if step != "last":
        raise launch.Refused(
            f"the step is {step}, but {workdir} is a delta of one step; leave it out."
        )
    init = task.config.get("init", {})
    base = parameters_of(init.get("from"), init.get("step"))
    return weights.deltas.read(storage.local_copy(workdir) / DELTA).applied(base)


def parameters(task: Any, workdir: Folder, step: str = "last", member: str | None = None) -> Any:
    """Returns the parameters of a checkpoint of a run, the averaged ones if it has them.

    They lie on the config's mesh; if that is for another number of devices, each has all of them. Of
    several runs that were trained as one, they are the named member's, or the first one's.

    Raises:
      Refused: the run has no such member.
    """
    members = members_of(task.config)
    if member is not None and member not in members:
        known = ", ".join(members) or "it is one run; leave --member out"
        raise launch.Refused(f"--member is {member!r}; expected one of the run's: {known}.")
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    try:
        mesh = config_mesh(task.config)
    except SettingsError:
        raise
    except ValueError:
        mesh = make_mesh()
    places = params_sharding(shapes, task.logical_axes(), mesh)
    if has_delta(workdir):
        return jax.device_put(_of_delta(task, workdir, step), places)
    wanted = _number(step)
    if not members:
        target = with_sharding(shapes, places)
        return load_params(workdir / "checkpoints", target, step=wanted)[0]
    target = stacked(with_sharding(shapes, places), len(members))
    params, _ = load_params(workdir / "checkpoints", target, step=wanted)
    return jax.jit(take, out_shardings=places)(params, members.get(member or "", 0))
