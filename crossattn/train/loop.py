"""The training loop.

A run that is killed at any moment and started again with the same config and work directory ends with the
parameters, bit for bit, of an uninterrupted run. With another mesh or number of processes it continues on the
same batches, as long as the data's position is one for all processes (as that of `crossattn.data` is); sums
then run in another order, and the parameters agree up to rounding.

A run starts from the newest checkpoint that can be read: state, position in the data, and logs, whose later
lines are dropped. Without a checkpoint it starts from the seed.
"""

import contextlib
import errno
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from crossattn.train import members as several
from crossattn.train import processes, storage, xla
from crossattn.train.checkpoint import Checkpoints, Restored
from crossattn.train.config import (
    Task,
    TaskOfMembers,
    TrainConfig,
    TrainIterator,
    WatchedTask,
)
from crossattn.train.errors import CheckpointError, NonFiniteLoss, TrainError
from crossattn.train.metrics import Meter
from crossattn.train.optim import of_more_steps
from crossattn.train.profile import Trace
from crossattn.train.program import Program, make_program
from crossattn.train.sharding import data_shard, make_mesh, put_batch
from crossattn.train.state import TrainState
from crossattn.train.storage import Folder
from crossattn.train.workdir import claim
from crossattn.train.writers import Several, Writer, default_writers

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Initial = Callable[[Any], Any]
"""From fresh parameters on their devices to the initial parameters of a run."""

PeakSeconds = Callable[[Any, Any], float | None]
"""From parameters and a batch, or their shapes, to the seconds of a step's model FLOPs at the peak."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Attributes:
      status: "finished", "interrupted" or "already finished".
      evaluation: metrics of the last evaluation.
      totals: train_seconds and compile_seconds of the whole run, and tokens if the loss counts them.
    """

    status: str
    step: int
    state: TrainState
    evaluation: dict[str, float]
    totals: dict[str, float]


def train(
    task: Task,
    config: TrainConfig,
    workdir: str | Folder,
    *,
    settings: Mapping[str, Any] | None = None,
    writers: Sequence[Writer] | None = None,
    initial: Initial | None = None,
    peak_seconds: PeakSeconds | None = None,
) -> TrainResult:
    """Trains to config.steps or until a stop request, and writes everything to workdir.

    Args:
        settings: settings that identify the run, default the config; this workdir then refuses others,
            except those of workdir.MAY_CHANGE and more steps, under the schedule of their new number.
        writers: default JSONL, TensorBoard and console.
        initial: makes the initial parameters of a new run from its fresh ones; None keeps these.
        peak_seconds: for the log of MFU; None logs none.

    Raises:
        TrainError: see errors.py; checkpoints on disk stay good in every case.
    """
    workdir = storage.absolute(workdir)
    with claim(workdir, settings or asdict(config), config.checkpoint.resume) as steps_before:
        if writers is None:
            writers = default_writers(workdir, config.steps)
        log = Several(writers)
        checkpoints = Checkpoints(
            workdir / "checkpoints",
            keep=config.checkpoint.keep,
            best_metric=config.checkpoint.best_metric,
            best_mode=config.checkpoint.best_mode,
            note=log.note,
        )
        try:
            run = _Run(task, config, workdir, log, checkpoints, initial, peak_seconds)
            with contextlib.closing(run.trace):
                result = run.result(steps_before)
        except BaseException as error:
            for each in (checkpoints, log):
                with contextlib.suppress(TrainError, OSError):  # they would hide the error
                    each.close()
            if isinstance(error, OSError | TrainError) and not workdir.is_dir():
                said = f"the work directory {workdir} was removed while the run was in it"
                raise TrainError(said) from error
            if isinstance(error, OSError) and error.errno in _FULL:
                raise TrainError(
                    f"{error}; the checkpoints in {workdir} are safe, make room and start again to resume"
                ) from error
            raise
        checkpoints.close()
        log.close()
    return result


class _Run:
    """Parts of one call of `train`, and its loop."""

    def __init__(
        self,
        task: Task,
        config: TrainConfig,
        workdir: Folder,
        log: Several,
        checkpoints: Checkpoints,
        initial: Initial | None,
        peak_seconds: PeakSeconds | None,
    ):
        if config.attention_stats and not isinstance(task, WatchedTask):
            raise TrainError(
                f"attention_stats is set, but a {type(task).__name__} has no attention(params, step, "
                "folder); leave it out."
            )
        self.task, self.config, self.workdir = task, config, workdir
        self.initial, self.peak_seconds = initial, peak_seconds
        self.log, self.checkpoints = log, checkpoints
        self.mesh = make_mesh(config.mesh)
        self.program = make_program(task, config, self.mesh)
        self.meter = Meter(log, config.log_every, self.program.schedule, config.members)
        self.trace = Trace(
            workdir / "profile", config.profile_first, config.profile_steps, self._settle
        )
        self.evaluation: dict[str, float] = {}
        self.shapes_seen: dict[
            Any, float | None
        ] = {}  # of a batch -> seconds of a step at the peak

    def result(self, steps_before: int | None = None) -> TrainResult:
        """Trains; ``steps_before`` is the former number of steps of a run that grows."""
        with self.meter.paused():
            state, data, step = self._begin()
        if steps_before is not None and step > 0:
            self.log.note(of_more_steps(self.config.optim, steps_before, self.config.steps, step))
        if step >= self.config.steps:
            self.log.note(f"the run in {self.workdir} is finished: all {step} steps are made")
            return self._ended("already finished", step, state)
        with processes.StopRequest() as stop:
            while step < self.config.steps:
                self.trace.before(step + 1)
                state = self._advance(state, data, step)
                step += 1
                self.trace.after(step)
                self._evaluate_and_save(state, data, step)
                asked = stop.after(step)
                if asked and step < self.config.steps:
                    self._save(state, data, step)
                    self.checkpoints.wait()
                    self.log.note(
                        f"stopped after step {step} of {self.config.steps}; the same command"
                        " goes on from here"
                    )
                    return self._ended("interrupted", step, state)
        self.checkpoints.wait()
        return self._ended("finished", step, state)

    def _begin(self) -> tuple[TrainState, TrainIterator, int]:
        """Returns initial or restored state, data and step."""
        restored = self.checkpoints.restore(self.program.target)
        if restored is None and self.config.checkpoint.resume == "must":
            raise CheckpointError(
                f"resume is 'must' but there is no checkpoint in {self.workdir / 'checkpoints'}"
            )
        data = batches(self.task, self.config, self.mesh)
        if restored is None:
            if processes.is_main():
                with storage.filled(self.workdir / "assets") as assets:
                    self.task.save_assets(assets)
            state, step = fresh_state(self.program, self.initial), 0
        else:
            state, step = restored.state, int(restored.state.step)
            self._take_position(restored, data)
        self.log.start(step)
        if 0 < step < self.config.steps:
            self.log.note(f"going on from the checkpoint of step {step}")
        return state, data, step

    def _take_position(self, restored: Restored, data: TrainIterator) -> None:
        data.set_state(restored.data_state)
        self.meter.set_state(restored.info["meter"])
        self.evaluation = restored.info["evaluation"]
        if not restored.same_position:
            self.log.note(
                "the checkpoint is of another number of processes, each with a position of its own in"
                " the data: examples of the current epoch may be seen twice or not at all"
            )

    def _advance(self, state: TrainState, data: TrainIterator, step: int) -> TrainState:
        """Starts one step on the device."""
        with self.meter.waiting_for_input():
            batch = put_batch(next(data), self.mesh, bool(self.config.members), self.program.along)
        shapes = tuple((name, x.shape) for name, x in sorted(batch.items()))
        try:
            with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
                if shapes in self.shapes_seen:
                    state, metrics = self.program.step(state, batch)
                else:
                    with self.meter.compiling():
                        known = self.peak_seconds
                        peak = None if known is None else known(state.params, batch)
                        self.shapes_seen[shapes] = peak
                        state, metrics = self.program.step(state, batch)
            self.meter.add(step + 1, metrics, self.shapes_seen[shapes])
        except NonFiniteLoss as error:
            raise self._explained(error) from None
        return state

    def _evaluated(self, state: TrainState, step: int) -> dict[str, float]:
        """Returns the metrics of the parameters; of members the mean and each."""
        members, params = self.config.members, state.eval_params
        if not members:
            return self._metrics(params, step, self.workdir / "attention")
        each = [
            self._metrics(self.program.member(params, index), step, None)
            for index in range(len(members))
        ]
        return several.spread_all(each, members)

    def _metrics(self, params: Any, step: int, pictures: Folder | None) -> dict[str, float]:
        found = {name: float(x) for name, x in self.task.evaluate(params, step).items()}
        if not isinstance(self.task, WatchedTask) or not self.config.attention_stats:
            return found
        return found | self.task.attention(params, step, pictures)

    def _evaluate_and_save(self, state: TrainState, data: TrainIterator, step: int) -> None:
        config = self.config
        last = step == config.steps
        evaluate = last or (config.eval_every > 0 and step % config.eval_every == 0)
        best = evaluate and config.checkpoint.best_metric is not None
        if evaluate:
            with self._paused():
                self.evaluation = self._evaluated(state, step)
                self.log.write(step, "eval", self.evaluation)
        if last or best or step % config.checkpoint.every == 0:
            self._save(state, data, step, self.evaluation if evaluate else None)

    def _save(
        self,
        state: TrainState,
        data: TrainIterator,
        step: int,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        with self._paused():
            info = {"meter": self.meter.get_state(), "evaluation": self.evaluation}
            self.checkpoints.save(
                step, state, data_state=data.get_state(), metrics=metrics, info=info
            )

    def _paused(self):
        """Pauses the meter, after a check that all steps were finite."""
        self._settle()
        return self.meter.paused()

    def _settle(self) -> None:
        """Waits for the steps that the devices are computing."""
        try:
            self.meter.flush()
        except NonFiniteLoss as error:
            raise self._explained(error) from None

    def _explained(self, error: NonFiniteLoss) -> NonFiniteLoss:
        self.checkpoints.wait()
        steps = self.checkpoints.steps
        kept = "there is no checkpoint yet"
        if steps:
            kept = f"the last good checkpoint is that of step {steps[-1]}"
        return NonFiniteLoss(
            f"{error}; {kept}. Try a lower learning rate, a longer warm-up or a smaller clip_norm"
        )

    def _ended(self, status: str, step: int, state: TrainState) -> TrainResult:
        return TrainResult(status, step, state, self.evaluation, self.meter.totals)


def fresh_state(program: Program, initial: Initial | None = None) -> TrainState:
    """Returns the state before the first step, of all members."""
    key, places, members = program.key, program.sharding, program.key.ndim > 0
    once = functools.partial(jax.jit, compiler_options=xla.flags(xla.quickly()))
    if initial is None:
        return once(program.fresh, out_shardings=places)(key)
    own = None if places is None else places.params
    params = once(program.init, out_shardings=own)(key)
    if members:
        each = [initial(program.member(params, index)) for index in range(len(key))]
        params = once(several.stack, out_shardings=own)(each)
    else:
        params = initial(params)
    return once(program.begun, out_shardings=places, donate_argnums=0)(params)


def batches(task: Task, config: TrainConfig, mesh: Mesh | None) -> TrainIterator:
    """Returns this process's batches from the start of the data; of members, stacked ones.

    Raises:
        TrainError: the task has no batches by seed, and the run has members.
    """
    shard = data_shard(mesh)
    if not config.members:
        return task.train_iterator(*shard)
    if not isinstance(task, TaskOfMembers):
        raise TrainError(
            f"{type(task).__name__} has no train_iterators(seeds, shard_index, shard_count), which"
            " train.seeds and train.sweep call; give it one, or train the seeds one by one"
        )
    seeds = [member.seed for member in config.members]
    return several.MemberBatches(task.train_iterators(seeds, *shard))
