"""Checkpoints: the state, the data's position and a little JSON, written as one or not at all.

The one thing to know: everything is read back into a target (shapes, dtypes and shardings), so a
run may be saved on one mesh and loaded on another, and what is read is compared with checksums
taken when it was written. All processes call every function; process 0 does the housekeeping.

Layout: DIRECTORY/STEP/{params,opt_state,ema} as Orbax trees, the JSON in Orbax's own metadata,
and the seal over all these files (`checkpoint_files`). There are two checksums because Orbax takes none of
files and does not ask its driver for those of arrays: the seal's says which file is damaged before anything
is loaded, and that of arrays holds in object stores too, whose files would have to be fetched twice.
"""

import contextlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from crossattn.train import processes, storage
from crossattn.train.checkpoint_files import (
    abstract,
    check_intact,
    describe,
    from_json,
    goodness,
    one_line,
    quiet_orbax,
    read_record,
    read_trees,
    sealed_record,
    steps_in,
    to_json,
)
from crossattn.train.checkpoint_writing import Writing, clean_up
from crossattn.train.checksum import checksum
from crossattn.train.errors import CheckpointError, TrainError
from crossattn.train.exhausted import exhausted
from crossattn.train.state import TrainState
from crossattn.train.storage import Folder

_LOG = logging.getLogger(__name__)
_UNSEALED = "the checkpoint of step {} is of an earlier version and has no seal: only its arrays are checked"


@dataclass(frozen=True)
class Restored:
    """What was read of a checkpoint.

    Attributes:
      state: on the target's devices.
      data_state: for this process's iterator.
      info: as saved.
      same_position: whether data_state is the one that this process saved, or that all saved.
    """

    state: TrainState
    data_state: Any
    info: dict[str, Any]
    same_position: bool


class Checkpoints:
    """The checkpoints of one run.

    keep: how many of the newest stay; best_metric: the metric whose best checkpoint stays too;
    best_mode: "max" or "min"; note: is told in one line what was skipped, and why; before_seal: is
    called, in another thread, when all files of a checkpoint are there and none knows of it yet.
    """

    def __init__(
        self,
        directory: str | Folder,
        *,
        keep: int = 2,
        best_metric: str | None = None,
        best_mode: str = "max",
        note: Callable[[str], None] = print,
        before_seal: Callable[[], None] = lambda: None,
    ):
        if keep < 1 or best_mode not in ("max", "min"):
            raise ValueError(f"keep is {keep} (1 or more), best_mode {best_mode!r} (max or min)")
        self.directory = storage.absolute(directory)
        self._keep, self._best = keep, (best_metric, best_mode)
        self._note, self._before_seal = note, before_seal
        self._writing: Writing | None = None
        self._goodness_then: dict[int, float] = {}
        self._resources = contextlib.ExitStack()
        self._resources.enter_context(quiet_orbax())
        restored = None
        if processes.is_main():
            if not storage.in_store(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            clean_up(self.directory)
            restored = [(step, self._goodness_of(step)) for step in steps_in(self.directory)]
        # Kept in mind from here on: what the others would list may lag behind, or be half moved.
        self._goodness: dict[int, float] = dict(processes.gather(restored)[0])

    def _goodness_of(self, step: int) -> float:
        if self._best[0] is None:
            return -math.inf
        try:
            return goodness(read_record(self.directory / str(step))["metrics"], *self._best)
        except Exception:  # Damaged: `restore` says so, and it is not the best of any.
            return -math.inf

    def _superfluous(self, steps: Mapping[int, float]) -> list[int]:
        """Which of the checkpoints (step -> goodness) need not stay."""
        stay = set(sorted(steps)[-self._keep :])
        if self._best[0] is not None:
            stay.add(max(steps, key=lambda step: (steps[step], step)))
        return sorted(steps.keys() - stay)

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints that are complete, oldest first."""
        return sorted(self._goodness)

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        data_state: Any = None,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts to write a checkpoint; the state may be donated as soon as this returns.

        Raises:
            CheckpointError: the disk is full, or the save before this one failed.
        """
        if step in self.steps or (self._writing is not None and self._writing.step == step):
            return
        trees = _trees(state)
        self._refuse_full_disk(step, trees)
        record = {
            "step": step,
            "arrays": describe(trees),
            "checksums": {name: checksum(tree) for name, tree in trees.items()},
            "data": processes.gather(to_json(data_state)),
            "metrics": None if metrics is None else dict(metrics),
            "best": list(self._best),
            "info": dict(info or {}),
        }
        # It is written later; by then the caller may have changed what it gave.
        record = sealed_record(json.loads(json.dumps(record)))
        self.wait()
        then = {**self._goodness, step: goodness(metrics, *self._best)}
        superfluous = self._superfluous(then)
        try:
            self._writing = Writing(
                self.directory, step, trees, record, superfluous, self._before_seal
            )
        except Exception as error:
            raise self._failed(error) from error
        self._goodness_then = {each: then[each] for each in then if each not in superfluous}

    def restore(self, target: TrainState) -> Restored | None:
        """The newest checkpoint that can be read, or None if there never was one.

        Newer ones that cannot be read are put aside in `unreadable/` next to the directory.

        Raises:
            CheckpointError: there are checkpoints, but none can be read into the target.
        """
        failures: dict[int, str] = {}
        for step in reversed(self.steps):
            folder = self.directory / str(step)
            try:
                record, sealed = check_intact(folder)
                trees = read_trees(folder, _trees(target), record)
            except Exception as error:
                failures[step] = one_line(error)
                continue
            self._put_aside(failures, step)
            if not sealed:
                self._note(_UNSEALED.format(step))
            state = TrainState(
                step=_like(step, target.step),
                params=trees["params"],
                opt_state=trees["opt_state"],
                ema=trees.get("ema"),
            )
            data, count = record["data"], jax.process_count()
            own = data[jax.process_index() if len(data) == count else 0]
            same = len(data) == count or all(other == own for other in data)
            return Restored(state, from_json(own), record["info"], same)
        if failures:
            step, cause = next(iter(failures.items()))
            raise CheckpointError(
                f"none of the checkpoints in {self.directory} can be read (step {step}: {cause});"
                " start over with resume 'never' or with a new work directory"
            )
        return None

    def wait(self) -> None:
        """Until what was being saved is on disk, or in the store.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are as they were.
            TrainError: `before_seal` refused; likewise.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except TrainError:  # It was not to be sealed, and the folder may be another's by now.
            raise
        except Exception as error:
            raise self._failed(error) from error
        self._goodness = self._goodness_then

    def close(self) -> None:
        """Waits, then lets go of the directory. Raises as `wait` does."""
        with self._resources:
            self.wait()

    def _refuse_full_disk(self, step: int, trees: Mapping[str, Any]) -> None:
        if storage.in_store(self.directory):
            return
        need = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))
        free = shutil.disk_usage(self.directory).free
        if free < need * 1.02:
            raise CheckpointError(
                f"the disk of {self.directory} is full: the checkpoint of step {step} needs"
                f" {need / 1e6:.1f} MB, {free / 1e6:.1f} MB are free; make room; {self._loadable()}"
            )

    def _failed(self, error: Exception) -> TrainError:
        said = f"a checkpoint could not be written to {self.directory}"
        if storage.in_store(self.directory) and storage.is_away(error):
            return storage.refusal(said, error, self.directory)
        if processes.is_main():
            with contextlib.suppress(Exception):  # Where that fails too, the next start does it.
                clean_up(self.directory)
        cause = exhausted(error) or one_line(error)
        return CheckpointError(f"{said}: {cause}; {self._loadable()}")

    def _loadable(self) -> str:
        steps = self.steps
        if not steps:
            return "there is no earlier one; start again"
        return f"step {steps[-1]} is safe; start again to resume from it"

    def _put_aside(self, failures: Mapping[int, str], used: int) -> None:
        for step, cause in failures.items():
            aside = self.directory.parent / "unreadable" / str(step)
            self._note(
                f"checkpoint of step {step} cannot be read ({cause}): moved to {aside}; going on"
                f" from step {used}"
            )
            if processes.is_main():
                storage.delete(aside)
                if not storage.in_store(aside):
                    aside.parent.mkdir(parents=True, exist_ok=True)
                storage.move(self.directory / str(step), aside)
            del self._goodness[step]
        if failures:
            processes.barrier("unreadable checkpoints moved")


def load_params(
    directory: str | Folder, target: Any, *, step: int | str = "last", average: bool = True
) -> tuple[Any, int]:
    """(parameters, step) for evaluation, without the optimiser; changes nothing on disk.

    Args:
        directory: the checkpoints of a run.
        target: the parameters' shapes, dtypes and shardings (jax.eval_shape of init will do).
        step: a number, "last" (the newest that can be read) or "best" by the run's metric.
        average: takes the averaged parameters where the run kept them.

    Raises:
        CheckpointError: no such checkpoint, or it cannot be read into the target.
    """
    directory = storage.absolute(directory)
    if not directory.is_dir():
        raise CheckpointError(f"there are no checkpoints in {directory}: train first")
    failures = []
    with quiet_orbax():
        for candidate in _candidates(step, directory):
            folder = directory / str(candidate)
            try:
                record, sealed = check_intact(folder)
                name = "ema" if average and "ema" in record["checksums"] else "params"
                params = read_trees(folder, {name: target}, record)[name]
            except Exception as error:
                failures.append(f"step {candidate}: {one_line(error)}")
                continue
            if failures and processes.is_main():
                cause = "; ".join(failures)
                _LOG.warning("cannot read a checkpoint (%s): taking step %d", cause, candidate)
            if not sealed and processes.is_main():
                _LOG.warning(_UNSEALED.format(candidate))
            return params, candidate
    raise CheckpointError(f"no checkpoint in {directory} can be read ({'; '.join(failures)})")


def _candidates(step: int | str, directory: Folder) -> list[int]:
    """The steps to try, in order."""
    steps = steps_in(directory)
    if step == "last" and steps:
        return steps[::-1]
    if step == "best" and steps:
        records = {}
        for each in steps:
            try:
                records[each] = read_record(directory / str(each))
            except ValueError as error:
                raise CheckpointError(
                    f"the checkpoint of step {each} in {directory} cannot be read ({error}), so which"
                    " is best is not known; use 'last' or a step"
                ) from error
        metric, mode = records[steps[-1]]["best"]
        scores = {each: goodness(r["metrics"], metric, mode) for each, r in records.items()}
        best = max(steps, key=lambda each: (scores[each], each))
        if scores[best] == float("-inf"):
            raise CheckpointError(f"no checkpoint in {directory} has a best metric; use 'last'")
        return [best]
    if step in steps:
        return [int(step)]
    raise CheckpointError(f"there is no checkpoint {step!r} in {directory}; there are {steps}")


def _trees(state: TrainState) -> dict[str, Any]:
    trees = {"params": state.params, "opt_state": state.opt_state}
    return trees if state.ema is None else trees | {"ema": state.ema}


def _like(value: int, target: Any) -> jax.Array:
    return jax.device_put(jax.numpy.asarray(value, target.dtype), abstract(target).sharding)
