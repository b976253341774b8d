"""Train every architecture in small, and compare each with its baselines, in one table.

    python -m experiments.zoo
    python -m experiments.zoo --only=fashion_vit,emoji_group:image --seeds=1 --table=runs/zoo.json
    python -m experiments.zoo --split=validation --only=fashion_vit --steps=1500   # to choose its steps

Each config's ``tiny`` variant is trained on its synthetic data by Muon, all seeds as one program. The task
of a row has its metric (``headline``), its memory and its baselines, of which the table has the best on the
split that is scored; without any, the baseline is the model before training. ``blind`` is the same model,
trained and scored with its memory blanked; ``shuffled`` is the model with the memory of another example. A
row has learnt if all seeds are better than the baseline and than every blind seed. The exit code is 1 if a
row could not be trained.

A config file may name the variants that are rows, and their steps: ``ZOO = {"both": 600, "image": 800}``.
None are named where another row has the same model and task on the same data. ``ZOO_OPTIM = {}`` keeps the
optimiser of the config. ``ZOO_PARENT = {"child": ("parent", 400)}`` names the variant that a row begins with,
and its steps: one run for all seeds of the row, whose seconds count.
"""

import contextlib
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from crossattn import functional, models
from crossattn.train import xla
from crossattn.train.config import TrainConfig
from crossattn.train.errors import NonFiniteLoss
from crossattn.train.loop import batches, fresh_state
from crossattn.train.program import Program, make_program
from crossattn.train.sharding import make_mesh, put_batch
from crossattn.train.state import TrainState
from crossattn.train.storage import folder
from experiments import launch, report, train
from experiments.initial import assets_begun_with, initial
from experiments.runs import SPLIT
from experiments.settings import train_config
from experiments.tasks import make_task

_ONLY = flags.DEFINE_list("only", None, "Rows to train: names of configs, or CONFIG:VARIANT.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of a row.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Of each run; default: what the config says.", lower_bound=1
)
_TABLE = flags.DEFINE_string("table", None, "Also write the table into this file, as JSON.")
FLAGS = (_ONLY, _SEEDS, _STEPS, SPLIT, _TABLE)

STEPS = 800
"""Steps of a run, where the config file says nothing else."""

_OPTIM = dict(name="muon", learning_rate=1e-2)  # in a third of the steps that AdamW needs
_CONFIGS = Path(__file__).parents[1] / "configs"
_TITLES = (
    *("architecture", "config", "task", "parameters", "baseline", "reached", "blind", "shuffled"),
    *("learnt", "s"),
)


@dataclass
class Row:
    """A line of the table.

    Attributes:
      name: of the config and its variant, or of several that are the same.
      steps: of each run.
      task, architecture, parameters: of the model; ``parameters`` is their number.
      metric, best: name of the score, and whether "min" or "max" of it is best.
      baseline, must_beat: name and score of the best baseline.
      reached: the score of each seed.
      blind: of each seed trained without the memory; none where the task has no memory.
      shuffled: of each seed with the memory of another example.
      seconds: of the processor, for runs, compilation, and baselines where no row before has the data.
      failed: the error of a row that could not be trained.
    """

    name: str
    steps: int
    task: str = ""
    architecture: str = ""
    parameters: int = 0
    metric: str = ""
    best: str = "min"
    baseline: str = ""
    must_beat: float = 0.0
    reached: list[float] = field(default_factory=list)
    blind: list[float] = field(default_factory=list)
    shuffled: list[float] = field(default_factory=list)
    seconds: float = 0.0
    failed: str = ""

    @property
    def learning(self) -> int:
        """The number of seeds that are better than the baseline and than every blind seed."""
        sign = 1 if self.best == "max" else -1
        bar = max(sign * value for value in (self.must_beat, *self.blind))
        return sum(sign * value > bar for value in self.reached)


def main(arguments: Sequence[str]) -> int:
    """Trains the rows and prints the table."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    chosen = _joined(_chosen(experiments(_STEPS.value), _ONLY.value))
    path = None if _TABLE.value is None else folder(_TABLE.value)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        launch.writable(path)
    launch.keep_compiled()
    begun = time.process_time()
    rows, known = [], dict[Any, Any]()
    for name, config in chosen.items():
        rows.append(_row(name, config, _SEEDS.value, known))
        print(f"{name}: {' | '.join(_cells(rows[-1])[4:])} s", file=sys.stderr, flush=True)
    seconds = time.process_time() - begun
    print(table(rows))
    print(
        f"\n{len(rows)} rows of {_SEEDS.value} runs, scored on {SPLIT.value}, in {seconds / 60:.1f}"
        " minutes of processor time."
    )
    without = sorted(set(models.known()) - {row.architecture for row in rows})
    if without and _ONLY.value is None:
        print(f"No config trains {', '.join(without)} by itself.")
    if path is not None:
        report.save(
            {"split": SPLIT.value, "seconds": seconds, "rows": [asdict(row) for row in rows]}, path
        )
    return 1 if any(row.failed for row in rows) else 0


def experiments(steps: int | None = None) -> dict[str, Any]:
    """Returns the configs of the rows by their names; without ``steps``, with those of the files."""
    found = {}
    for path in sorted(_CONFIGS.glob("*.py")):
        module = importlib.import_module(f"configs.{path.stem}")
        if not hasattr(module, "get_config"):
            continue
        for variant, usual in getattr(module, "ZOO", {"": STEPS}).items():
            name = f"{path.stem}:{variant}" if variant else path.stem
            found[name] = _small(module, variant, steps or usual)
    return found


def parent(name: str, steps: int | None = None) -> Any:
    """Returns the config of the run that a row begins with; None if it begins with random parameters."""
    stem, _, variant = name.partition(", ")[0].partition(":")
    module = importlib.import_module(f"configs.{stem}")
    if variant not in (parents := getattr(module, "ZOO_PARENT", {})):
        return None
    before, usual = parents[variant]
    config = _small(module, before, steps or usual)
    config.train.log_every = config.checkpoint.every = config.train.steps
    return config


def _small(module: Any, variant: str, steps: int) -> Any:
    """Returns the tiny config of a variant of a config file, as rows are trained."""
    config = module.get_config(f"{variant},tiny".removeprefix(","))
    config.train.steps = steps
    config.train.xla_flags = xla.quickly()
    config.optim.update(getattr(module, "ZOO_OPTIM", _OPTIM))
    return config


def _chosen(configs: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the named configs, alone or with all variants of their file."""
    known = sorted({*configs, *(name.partition(":")[0] for name in configs)})
    if unknown := [name for name in names or () if name not in known]:
        raise launch.Refused(f"--only names {unknown[0]}; expected some of {', '.join(known)}.")
    return {
        name: config
        for name, config in configs.items()
        if names is None or {name, name.partition(":")[0]} & {*names}
    }


def _joined(configs: dict[str, Any]) -> dict[str, Any]:
    """Returns each config once, under the names of all that are the same."""
    joined: dict[str, Any] = {}
    for name, config in configs.items():
        same = next((other for other, known in joined.items() if known == config), None)
        joined[name if same is None else f"{same}, {name}"] = (
            config if same is None else joined.pop(same)
        )
    return joined


def _row(name: str, config: Any, seeds: int, known: dict[Any, dict[str, float]]) -> Row:
    """Returns the row of a config, which has the error if training fails.

    ``known`` has the baselines of rows before, by their data.
    """
    row, begun = Row(name, config.train.steps, config.task), time.process_time()
    try:
        with tempfile.TemporaryDirectory() as workdir:
            if (before := parent(name, _STEPS.value)) is not None:
                with contextlib.redirect_stdout(sys.stderr):
                    ended = train.run(before, folder(workdir))
                if ended.status == "interrupted":
                    raise KeyboardInterrupt
                config.init["from"] = workdir
            _train(row, config, seeds, known)
    except Exception as error:
        row.failed = f"{type(error).__name__}: {' '.join(str(error).split())}"
    row.seconds = time.process_time() - begun
    return row


def _train(row: Row, config: Any, seeds: int, known: dict[Any, dict[str, float]]) -> None:
    config.train.seeds = seeds
    values = train_config(config)
    assets = assets_begun_with(config)
    task = make_task(config, assets)
    task.refuse_unready()
    row.metric, row.best = task.headline
    row.architecture = _architecture(task)
    program = make_program(task, values, make_mesh(values.mesh))
    begun = fresh_state(program, initial(config, task))
    params = _members(program, begun.params, values)[0]
    row.parameters = functional.count(params)
    row.baseline, row.must_beat = _baseline(task, row, params, known)
    changes: list[Any] = [lambda batch: batch]
    if task.memory:
        blank = config.copy_and_resolve_references()
        blank.data.blind = True
        # Blanked batches, not a blind task, whose programs would be compiled again.
        changes.append(make_task(blank, assets).seen)
    trained = _trained(program, begun, task, values, changes)
    row.reached = [_score(row, task, each) for each in trained[0]]
    if task.memory:
        row.shuffled = [_score(row, task, each, task.shuffled) for each in trained[0]]
        row.blind = [_score(row, task, each, changes[1]) for each in trained[1]]


def _score(row: Row, task: Any, params: Any, change: Any = None) -> float:
    return task.split_loss(params, SPLIT.value, change)[row.metric]


def _trained(
    program: Program, begun: TrainState, task: Any, values: TrainConfig, changes: Sequence[Any]
) -> list[list[Any]]:
    """Returns the parameters of each seed, trained on the batches of each change."""
    states = [jax.tree.map(jnp.copy, begun) for _ in changes]
    data = batches(task, values, program.mesh)
    try:
        for step in range(1, values.steps + 1):
            batch = next(data)
            for index, change in enumerate(changes):
                put = put_batch(change(batch), program.mesh, bool(values.members), program.along)
                states[index], metrics = program.step(states[index], put)
                if not jax.device_get(metrics["finite"]).all():
                    raise NonFiniteLoss(f"step {step}: the loss or its gradient is not finite")
    finally:
        getattr(data, "close", lambda: None)()
    return [_members(program, state.eval_params, values) for state in states]


def _members(program: Program, params: Any, values: TrainConfig) -> list[Any]:
    if not values.members:
        return [params]
    return [program.member(params, index) for index in range(values.seeds)]


def _baseline(
    task: Any, row: Row, params: Any, known: dict[Any, dict[str, float]]
) -> tuple[str, float]:
    """Returns name and score of the best baseline, or of the model before training."""
    suffix = f"_{row.metric}"
    parts = (task.config.data, task.config.get("tokenizer"))
    data = (row.task, task.memory, *map(str, parts))
    if data not in known:
        known[data] = task.headline_baselines(SPLIT.value)
    found = {
        name.removesuffix(suffix).replace("_", " "): value
        for name, value in known[data].items()
        if name.endswith(suffix)
    }
    found = found or {"before training": task.split_loss(params, SPLIT.value)[row.metric]}
    best = (max if row.best == "max" else min)(found, key=found.__getitem__)
    return best, found[best]


def _architecture(task: Any) -> str:
    """Returns the name of the file of the model."""
    if task.checkpoint is None:
        return task.config.model.name
    return task.checkpoint.model.module.__module__.rpartition(".")[2]


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    return report.markdown([_TITLES, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    what = (row.architecture, row.name, row.task, f"{row.parameters:,}")
    if row.failed:
        return (*what, "", row.failed, "", "", "failed", f"{row.seconds:.0f}")
    of = len(row.reached)
    return (
        *what,
        f"{row.baseline}: {row.metric} {row.must_beat:.3f}",
        *map(_spread, (row.reached, row.blind, row.shuffled)),
        "all" if row.learning == of else f"{row.learning} of {of}" if row.learning else "**none**",
        f"{row.seconds:.0f}",
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    launch.run(main)
