import errno
import json
import os
import shutil
import signal
import threading

import jax
import numpy as np
import pytest
from toy_task import Log, ToyBatches, ToyTask, assert_same, param_shapes

from crossattn.train.checkpoint import load_params
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.errors import (
    CheckpointError,
    NonFiniteLoss,
    TrainError,
    WorkdirBusy,
    WorkdirMismatch,
)
from crossattn.train.loop import train
from crossattn.train.metrics import Meter
from crossattn.train.optim import OptimConfig
from crossattn.train.processes import StopRequest
from crossattn.train.workdir import claim, flatten
from crossattn.train.writers import Jsonl

OPTIM = OptimConfig(learning_rate=0.05, warmup_steps=3)


def run(workdir, log=None, task=None, checkpoint=None, **options):
    config = TrainConfig(
        **{"steps": 12, "optim": OPTIM, "log_every": 4, "ema_decay": 0.9, **options},
        checkpoint=CheckpointConfig(**{"every": 5, **(checkpoint or {})}),
    )
    log = log or Log()
    writers = [log, Jsonl(workdir / "metrics.jsonl")]
    return train(task or ToyTask(), config, workdir, writers=writers)


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


TIMES = ("seconds", "input_fraction", "per_second", "goodput", "mfu")


def numbers(workdir):
    """The log without what depends on the clock."""
    return [
        {k: v for k, v in line.items() if not any(word in k for word in TIMES)}
        for line in lines(workdir)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never interrupted."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, run(workdir)


def metered(start=0, peak_seconds=None, begun_with=None):
    """The values of a window of two steps, each a second from the start, and the meter's state after it."""
    log, now = Log(), [start]
    meter = Meter(log, 2, lambda step: 0.1, clock=lambda: now[0], wall=lambda: now[0])
    if begun_with is not None:
        meter.set_state(begun_with)
    metrics = {"sums": {"loss": 1.0, "weight": 0.25}, "grad_norm": 1.0, "finite": True}
    for step in (1, 2):
        now[0] += 1
        meter.add(step, metrics, peak_seconds)
        meter.flush()
    return log.windows[0], meter.get_state()


def test_a_window_shows_means_by_weight_and_the_share_of_its_seconds_at_the_peak():
    window, _ = metered(peak_seconds=0.25)
    assert window["loss"] == 4.0 and window["mfu"] == 0.25
    assert "mfu" not in metered()[0]


def test_goodput_counts_the_time_between_a_run_and_its_restart():
    first, state = metered()
    assert first["goodput"] == 1.0
    assert metered(start=6, begun_with=state)[0]["goodput"] == 4 / 8


@pytest.mark.slow
@pytest.mark.parametrize(("first", "steps", "stop_after"), [(6, 2, None), (2, 50, 3)])
def test_steps_are_traced_as_the_settings_say(tmp_path, first, steps, stop_after):
    result = run(tmp_path, Log(stop_after), profile_first=first, profile_steps=steps)
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    lines_of = (
        line
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        for line in plane.lines
    )
    traced = [
        dict(x.stats)["step_num"] for line in lines_of for x in line.events if x.name == "train"
    ]
    assert traced == list(range(first, min(first + steps, result.step + 1)))


def test_a_run_learns_and_leaves_everything_in_its_workdir(tmp_path):
    result = run(tmp_path, steps=150, log_every=50, checkpoint={"every": 100})
    assert result.status == "finished" and result.step == 150
    assert result.evaluation == {"accuracy": 1.0, "seen": 150.0}
    first, last = lines(tmp_path)[0], lines(tmp_path)[-2]
    assert last["loss"] < first["loss"]
    assert (tmp_path / "assets" / "vocabulary.txt").read_text() == "16"
    assert json.loads((tmp_path / "config.json").read_text())["optim.learning_rate"] == 0.05
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["100", "150"]


def test_the_log_says_where_the_time_went(whole):
    workdir, result = whole
    window = lines(workdir)[1]
    assert window["step"] == 8 and 0 <= window["input_fraction"] <= 1
    assert window["tokens_per_second"] > 0 and window["seconds_per_step"] > 0
    assert window["compile_seconds"] > 0
    batches = ToyBatches()
    tokens = sum((next(batches)["target_segment_ids"] > 0).sum() for _ in range(12))
    assert result.totals["tokens"] == tokens


@pytest.mark.slow
def test_more_steps_give_the_run_of_that_many_from_the_start(tmp_path):
    options = {"optim": OptimConfig(learning_rate=0.05, warmup_steps=3, schedule="constant")}
    straight = run(tmp_path / "straight", steps=9, **options)
    run(tmp_path / "more", steps=6, **options)
    log = Log()
    more = run(tmp_path / "more", log, steps=9, **options)
    assert_same(more.state, straight.state)
    assert "the schedule 'constant' those made are the first of 9 steps too" in log.notes[-1]


def test_more_steps_go_on_under_the_schedule_of_their_number(tmp_path):
    optim = OptimConfig(learning_rate=0.05, warmup_steps=3, schedule="linear")
    run(tmp_path, steps=6, optim=optim)
    log = Log()
    assert run(tmp_path, log, steps=12, optim=optim).step == 12
    # By hand: the last of 6 steps has nothing of the peak, the seventh of 12 five ninths.
    assert "6 before: the schedule 'linear' is that of 12 steps from here on" in log.notes[-1]
    assert "the learning rate goes from 0 to 0.0278; a run of 12 steps" in log.notes[-1]
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 12
    with pytest.raises(WorkdirMismatch, match="steps was 12, is 6"):
        run(tmp_path, steps=6, optim=optim)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stop_after", [1, 5, 7])
def test_stopped_and_gone_on_with_is_the_run_never_stopped(whole, tmp_path, stop_after):
    log = Log(stop_after)
    stopped = run(tmp_path, log)
    assert stopped.status == "interrupted" and stop_after <= stopped.step < 12
    assert log.notes[-1].startswith(f"stopped after step {stopped.step} of 12; the same command")
    log = Log()
    finished = run(tmp_path, log)
    assert log.notes == [f"going on from the checkpoint of step {stopped.step}"]
    assert log.ticks == list(range(stopped.step + 1, 13))
    assert_same(finished.state, whole[1].state)
    assert numbers(tmp_path) == numbers(whole[0])


def test_a_finished_run_says_so_and_stays_as_it_is(whole):
    workdir, result = whole
    log = Log()
    again = run(workdir, log)
    assert again.status == "already finished" and log.ticks == []
    assert "is finished: all 12 steps are made" in log.notes[0]
    assert again.evaluation == result.evaluation
    assert_same(again.state, result.state)


def test_a_checkpoint_lost_on_the_way_changes_nothing_in_the_end(whole, tmp_path):
    run(tmp_path, Log(stop_after=7))
    newest = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    for path in (tmp_path / "checkpoints" / str(newest)).rglob("d/*"):
        path.write_bytes(b"nonsense")
    log = Log()
    finished = run(tmp_path, log)
    assert f"step {newest} cannot be read" in log.notes[0]
    assert log.notes[1] == "going on from the checkpoint of step 5"
    assert_same(finished.state, whole[1].state)
    assert numbers(tmp_path) == numbers(whole[0])


def test_a_loss_that_is_not_finite_stops_at_its_step_and_keeps_the_last_good(whole, tmp_path):
    said = r"step 8: the loss is nan .* last good checkpoint is that of step 5\. Try"
    with pytest.raises(NonFiniteLoss, match=said):
        run(tmp_path, task=ToyTask(poison_at=8))
    params, step = load_params(tmp_path / "checkpoints", param_shapes())
    assert step == 5 and all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    assert_same(run(tmp_path).state, whole[1].state)


@pytest.mark.parametrize("poison_at", [5, 12])
def test_a_step_that_is_not_finite_is_never_saved_or_evaluated(tmp_path, poison_at):
    with pytest.raises(NonFiniteLoss, match=f"step {poison_at}"):
        run(tmp_path, task=ToyTask(poison_at=poison_at), eval_every=5)
    assert str(poison_at) not in os.listdir(tmp_path / "checkpoints")
    assert all(line["step"] < poison_at for line in lines(tmp_path))


def test_a_run_that_trained_no_step_gives_way_to_another_config(tmp_path, caplog):
    with claim(tmp_path, {"seed": 0}, "auto"):
        (tmp_path / "checkpoints").mkdir()
    with claim(tmp_path, {"seed": 1}, "auto"):
        pass
    assert "had trained no step; it was put aside" in caplog.text
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 1}
    assert json.loads((tmp_path / "previous-1" / "config.json").read_text()) == {"seed": 0}
    for name in ("delta.safetensors", "checkpoints/5"):
        (tmp_path / name).mkdir(parents=True)
        with pytest.raises(WorkdirMismatch, match="seed was 1, is 2"):
            with claim(tmp_path, {"seed": 2}, "auto"):
                pass
        shutil.rmtree(tmp_path / name)


def test_another_config_is_refused_key_by_key(whole):
    workdir, _ = whole
    before = sorted(os.listdir(workdir))
    said = r"optim\.learning_rate was 0\.05, is 0\.1; seed was 0, is 1\): use the old values"
    with pytest.raises(WorkdirMismatch, match=said):
        run(workdir, seed=1, optim=OptimConfig(learning_rate=0.1, warmup_steps=3))
    assert sorted(os.listdir(workdir)) == before


def test_what_does_not_change_the_result_may_change(whole):
    assert run(whole[0], log_every=3, checkpoint={"every": 2, "keep": 5}).step == 12


def test_resume_never_puts_the_old_run_aside_and_starts_over(tmp_path):
    run(tmp_path, steps=3)
    old = lines(tmp_path)
    (tmp_path / "results-test.json").write_text("{}")
    result = run(tmp_path, steps=2, checkpoint={"resume": "never"})
    assert result.status == "finished" and result.step == 2
    assert lines(tmp_path / "previous-1") == old
    assert (tmp_path / "previous-1" / "checkpoints" / "3").is_dir()
    # Scores of the old run are not left for the new one.
    assert (tmp_path / "previous-1" / "results-test.json").exists() and not (
        tmp_path / "results-test.json"
    ).exists()


def test_resume_must_wants_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="resume is 'must' but there is no checkpoint"):
        run(tmp_path, checkpoint={"resume": "must"})


def test_two_runs_cannot_share_a_workdir(tmp_path):
    with claim(tmp_path, {}, "auto"), pytest.raises(WorkdirBusy, match="another process"):
        run(tmp_path)


def test_evaluation_of_the_average_comes_on_time_and_the_best_checkpoint_stays(tmp_path):
    class Peaked(ToyTask):
        def evaluate(self, params, step):
            self.seen = jax.device_get(params)
            return {"score": -abs(step - 4.0)}

    options = {"eval_every": 2, "checkpoint": {"best_metric": "score", "keep": 1, "every": 100}}
    task = Peaked()
    result = run(tmp_path, task=task, **options)
    assert_same(task.seen, result.state.ema)
    scores = [(x["step"], x["score"]) for x in lines(tmp_path) if x["kind"] == "eval"]
    assert scores == [(s, -abs(s - 4.0)) for s in (2, 4, 6, 8, 10, 12)]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["12", "4"]
    assert load_params(tmp_path / "checkpoints", param_shapes(), step="best")[1] == 4
    assert result.evaluation == {"score": -8.0}


def test_an_error_in_the_task_reaches_the_caller_and_loses_nothing(whole, tmp_path):
    class Failing(ToyTask):
        def evaluate(self, params, step):
            raise RuntimeError("no more metrics")

    with pytest.raises(RuntimeError, match="no more metrics"):
        run(tmp_path, task=Failing())
    assert_same(run(tmp_path).state, whole[1].state)


def test_a_log_that_cannot_be_written_is_one_clear_error(whole, tmp_path):
    class Full(Log):
        def write(self, step, kind, values):
            if step == 8:
                raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TrainError, match="No space left on device; the checkpoints in .* are safe"):
        run(tmp_path, Full())
    assert_same(run(tmp_path).state, whole[1].state)


@pytest.mark.parametrize("every", [5, 100])
def test_a_work_directory_that_is_removed_is_one_sentence(tmp_path, every):
    class Removing(Log):
        def tick(self, step, values):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    (tmp_path / "run").mkdir()
    with pytest.raises(TrainError, match="the work directory .* was removed while the run was in"):
        run(tmp_path / "run", Removing(), checkpoint={"every": every})


def test_the_first_signal_asks_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.after(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.after(2)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # The next one kills.
    assert signal.getsignal(signal.SIGTERM) == before


def test_training_works_outside_the_main_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path, steps=1)))
    thread.start()
    thread.join()
    assert results[0].status == "finished"


def test_settings_are_flattened_to_dotted_keys():
    assert flatten({"b": {"c": (1, 2)}, "a": None}) == {"a": None, "b.c": [1, 2]}


def test_a_config_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"steps \(0\)"):
        TrainConfig(steps=0)
    with pytest.raises(ValueError, match="resume is 'maybe'"):
        TrainConfig(steps=1, checkpoint=CheckpointConfig(resume="maybe"))
