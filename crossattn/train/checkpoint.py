"""Checkpoints of Orbax, each with a seal; a damaged one gives way to the one before.

A checkpoint is read into a target (shapes, dtypes and shardings), so a run may be saved on one mesh and
loaded on another. All processes call every function; process 0 alone seals, checks and moves files.

Layout: DIRECTORY/STEP/{params,opt_state,ema} as Orbax trees, the record (the data's position, metrics) as
their custom metadata, and the seal, the sizes and checksums of all these files. Orbax commits them together.
"""

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from crossattn.train import processes, seal, storage
from crossattn.train.errors import CheckpointError
from crossattn.train.state import TrainState, from_json, to_json
from crossattn.train.storage import Folder

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """Contents of a checkpoint.

    Attributes:
      state: on the target's devices.
      data_state: for this process's iterator.
      info: as saved.
      same_position: whether this process, or every process, saved this data_state.
    """

    state: TrainState
    data_state: Any
    info: dict[str, Any]
    same_position: bool


class Checkpoints:
    """Checkpoints of one run.

    keep: number of the newest that stay; best_metric: metric whose best checkpoint stays too;
    best_mode: "max" or "min"; note: receives one line about each checkpoint that cannot be read.
    """

    def __init__(
        self,
        directory: str | Folder,
        *,
        keep: int = 2,
        best_metric: str | None = None,
        best_mode: str = "max",
        note: Callable[[str], None] = print,
    ):
        if keep < 1 or best_mode not in ("max", "min"):
            raise ValueError(f"keep is {keep} (1 or more), best_mode {best_mode!r} (max or min)")
        self.directory = storage.absolute(directory)
        self._best, self._note = (best_metric, best_mode), note
        self._saving: tuple[int, Any] | None = None
        self._sealing: int | None = None
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(quiet_orbax())
        context = _context()
        # Not a bound method: Orbax copies its context, and would copy the method's object.
        context.async_options.post_finalization_callback = lambda: self._seal()
        policies, best = ocp.training.preservation_policies, _Best()
        self._goodness = best.goodness
        kept = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
        self._orbax = ocp.training.Checkpointer(
            str(self.directory),
            context=context,
            preservation_policy=kept,  # pyright: ignore[reportArgumentType]  its types disagree
            cleanup_tmp_directories=True,
        )
        if best_metric is not None:
            found = [(step, self._goodness_of(step)) for step in self.steps]
            self._goodness.update(processes.gather(found)[0])

    @property
    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        saving = None if self._saving is None else self._saving[0]
        return [each.step for each in self._orbax.checkpoints if each.step != saving]

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        data_state: Any = None,
        metrics: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts to write a checkpoint; the caller may donate the state as soon as this returns.

        Raises:
            CheckpointError: this checkpoint, or the one before it, could not be written.
        """
        if any(each.step == step for each in self._orbax.checkpoints):
            return
        trees = _trees(state)
        record = {
            "step": step,
            "arrays": _described(trees),
            "data": processes.gather(to_json(data_state)),
            "metrics": None if metrics is None else dict(metrics),
            "best": list(self._best),
            "info": dict(info or {}),
        }
        # A copy: Orbax writes it later, when the caller may have changed its values.
        record = json.loads(json.dumps(record))
        record["checksum"] = seal.crc_of(record)
        self.wait()
        if self._best[0] is not None:
            self._goodness[step] = _goodness(metrics, *self._best)
        self._sealing = step
        try:
            response = self._orbax.save_checkpointables_async(
                step, trees, force=True, custom_metadata=record
            )
        except Exception as error:  # Orbax raises errors of all kinds.
            raise self._failed(error) from error
        self._saving = step, response

    def restore(self, target: TrainState) -> Restored | None:
        """Reads the newest checkpoint that can be read; returns None if there is no checkpoint at all.

        Newer ones that cannot be read are moved to `unreadable/` next to the directory.

        Raises:
            CheckpointError: there are checkpoints, but none can be read into the target.
        """
        found, failures = _newest(self.directory, self.steps[::-1], lambda _: _trees(target))
        if found is None and failures:
            step, cause = next(iter(failures.items()))
            raise CheckpointError(
                f"none of the checkpoints in {self.directory} can be read (step {step}: {cause});"
                " start over with resume 'never' or with a new work directory"
            )
        if found is None:
            return None
        step, record, trees = found
        self._put_aside(failures, step)
        number = jax.numpy.asarray(step, target.step.dtype)
        state = TrainState(
            jax.device_put(number, _abstract(target.step).sharding), **{"ema": None, **trees}
        )
        data, count = record["data"], jax.process_count()
        own = data[jax.process_index() if len(data) == count else 0]
        same = len(data) == count or all(other == own for other in data)
        return Restored(state, from_json(own), record["info"], same)

    def wait(self) -> None:
        """Waits until the checkpoint in progress is committed.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are unchanged.
        """
        if self._saving is not None:
            try:
                self._saving[1].result()  # frees Orbax's thread, too
            except Exception as error:
                raise self._failed(error) from error
            self._saving = None

    def close(self) -> None:
        """Waits, then closes Orbax's checkpointer. Raises as `wait` does."""
        with self._quiet:
            try:
                self.wait()
            finally:
                self._saving = None
                with contextlib.suppress(Exception):  # `wait` has raised it.
                    self._orbax.close()

    def _seal(self) -> None:
        """Seals a checkpoint; Orbax calls it in its thread before it commits the files."""
        if processes.is_main():
            for folder in storage.children(self.directory):
                if folder.name.partition(".")[0] == str(self._sealing):  # or its temporary name
                    seal.write_seal(folder)

    def _goodness_of(self, step: int) -> float:
        try:
            return _goodness(_read_record(self.directory / str(step))["metrics"], *self._best)
        except Exception:  # Damaged, which `restore` reports.
            return -math.inf

    def _failed(self, error: Exception) -> CheckpointError:
        self._saving = None
        safe = "there is no earlier one; start again"
        if steps := steps_in(self.directory):
            safe = f"step {steps[-1]} is safe; start again to resume from it"
        said = f"a checkpoint could not be written to {self.directory}"
        return CheckpointError(f"{said}: {_one_line(error)}; {safe}")

    def _put_aside(self, failures: Mapping[int, str], used: int) -> None:
        for step, cause in failures.items():
            aside = self.directory.parent / "unreadable" / str(step)
            self._note(
                f"checkpoint of step {step} cannot be read ({cause}): moved to {aside}; going on"
                f" from step {used}"
            )
            if processes.is_main():
                storage.delete(aside)
                storage.move(self.directory / str(step), aside)
        if failures:
            processes.barrier("unreadable checkpoints moved")
            self._orbax.reload()


class _Best:
    """Policy of Orbax that keeps the best checkpoint; ``goodness`` of a step is empty without a metric."""

    def __init__(self):
        self.goodness: dict[int, float] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [each.step for each in checkpoints]
        best = max(self.goodness.keys() & steps, key=self._key, default=None)
        return [step == best for step in steps]

    def _key(self, step: int) -> tuple[float, int]:
        return self.goodness[step], step


def load_params(
    directory: str | Folder, target: Any, *, step: int | str = "last", average: bool = True
) -> tuple[Any, int]:
    """Reads (parameters, step) for evaluation, without the optimiser; changes nothing on disk.

    Args:
        directory: the checkpoints of a run.
        target: the parameters' shapes, dtypes and shardings (jax.eval_shape of init will do).
        step: a number, "last" (the newest that can be read) or "best" by the run's metric.
        average: reads the averaged parameters if the run has them.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be read into the target.
    """
    directory = storage.absolute(directory)
    if not directory.is_dir():
        raise CheckpointError(f"there are no checkpoints in {directory}: train first")

    def wanted(record: Mapping[str, Any]) -> dict[str, Any]:
        return {"ema" if average and "ema" in record["arrays"] else "params": target}

    with quiet_orbax():
        found, failures = _newest(directory, _candidates(step, directory), wanted)
    cause = "; ".join(f"step {step}: {error}" for step, error in failures.items())
    if found is None:
        raise CheckpointError(f"no checkpoint in {directory} can be read ({cause})")
    taken, _, trees = found
    if failures and processes.is_main():
        _LOG.warning("cannot read a checkpoint (%s): taking step %d", cause, taken)
    (params,) = trees.values()
    return params, taken


def find_step(directory: Folder, step: int | str) -> int:
    """Returns the number of a step, of "last" or of "best", which ``load_params`` reads if it can be read.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    with quiet_orbax():
        return _candidates(step, storage.absolute(directory))[0]


def steps_in(directory: Folder) -> list[int]:
    """Returns the steps of the checkpoints in a directory, oldest first."""
    names = (each.name for each in storage.children(directory))
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Hides the stack traces that Orbax logs of errors that it raises as well."""

    def other(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _context() -> ocp.Context:
    context = ocp.Context()
    # Trained float32 hardly compresses.
    context.array.saving.use_compression = False
    # Otherwise the process waits for minutes if a folder cannot be made.
    context.async_options.create_directories_asynchronously = False
    return context


_Wanted = Callable[[Mapping[str, Any]], dict[str, Any]]
"""From the record of a checkpoint to the trees to read, by name, with their shapes and places."""


def _newest(
    directory: Folder, steps: Sequence[int], wanted: _Wanted
) -> tuple[tuple[int, dict[str, Any], dict[str, Any]] | None, dict[int, str]]:
    """Reads (step, record, trees) of the first step that can be read; returns why the others cannot."""
    failures: dict[int, str] = {}
    for step in steps:
        try:
            return (step, *_read(directory / str(step), wanted)), failures
        except Exception as error:  # Orbax raises errors of all kinds.
            failures[step] = _one_line(error)
    return None, failures


def _read(folder: Folder, wanted: _Wanted) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads (record, trees) of a checkpoint.

    Process 0 checks the files before any process reads them, so that all agree on which can be read.
    """
    checked: dict[str, Any] = {}
    if processes.is_main():
        try:
            seal.check_seal(folder)
            checked = {"record": _read_record(folder)}
        except Exception as error:
            checked = {"wrong": _one_line(error)}
    checked = processes.gather(checked)[0]
    if "wrong" in checked:
        raise ValueError(checked["wrong"])
    record = checked["record"]
    targets = {name: jax.tree.map(_abstract, tree) for name, tree in wanted(record).items()}
    for name, described in _described(targets).items():
        saved = record["arrays"].get(name, {})
        for key in sorted(described.keys() | saved.keys()):
            if described.get(key) != saved.get(key):
                raise ValueError(
                    f"{name} {key} is {saved.get(key, 'missing')} in the checkpoint and"
                    f" {described.get(key, 'missing')} in the model"
                )
    with _context():
        return record, ocp.load_checkpointables(str(folder), targets)


def _read_record(folder: Folder) -> dict[str, Any]:
    """Reads the record of a checkpoint; raises ValueError if it is missing, damaged or of another step."""
    try:
        with _context():
            record = ocp.checkpointables_metadata(str(folder)).custom_metadata
    except Exception as error:  # Orbax raises errors of all kinds.
        raise ValueError(f"its metadata is missing or damaged ({_one_line(error)})") from error
    if not isinstance(record, dict) or str(record.get("step")) != folder.name:
        raise ValueError("its metadata is missing or damaged")
    rest = {key: value for key, value in record.items() if key != "checksum"}
    if record.get("checksum") != seal.crc_of(rest):
        raise ValueError("its metadata is damaged: the checksum does not match")
    return record


def _candidates(step: int | str, directory: Folder) -> list[int]:
    """Returns the steps to try, in order."""
    steps = steps_in(directory)
    if step == "last" and steps:
        return steps[::-1]
    if step == "best" and steps:
        records = {}
        for each in steps:
            try:
                records[each] = _read_record(directory / str(each))
            except ValueError as error:
                raise CheckpointError(
                    f"the checkpoint of step {each} in {directory} cannot be read ({error}), so which"
                    " is best is not known; use 'last' or a step"
                ) from error
        metric, mode = records[steps[-1]]["best"]
        scores = {each: _goodness(r["metrics"], metric, mode) for each, r in records.items()}
        best = max(steps, key=lambda each: (scores[each], each))
        if scores[best] == -math.inf:
            raise CheckpointError(f"no checkpoint in {directory} has a best metric; use 'last'")
        return [best]
    if step in steps:
        return [int(step)]
    raise CheckpointError(f"there is no checkpoint {step!r} in {directory}; there are {steps}")


def _goodness(metrics: Mapping[str, float] | None, name: str | None, mode: str) -> float:
    """Returns a number that is higher for a better metric, and lowest for one that is missing or NaN."""
    value = float((metrics or {}).get(name or "", math.nan))
    if math.isnan(value):
        return -math.inf
    return value if mode == "max" else -value


def _trees(state: TrainState) -> dict[str, Any]:
    trees = {"params": state.params, "opt_state": state.opt_state}
    return trees if state.ema is None else trees | {"ema": state.ema}


def _described(trees: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Returns {tree: {name of an array: dtype and shape}}."""
    return {
        name: {
            jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}"
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        for name, tree in trees.items()
    }


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, dtype and sharding of an array; without one, the first local device."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _one_line(error: BaseException) -> str:
    """Returns the error as one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
