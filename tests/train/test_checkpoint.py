import os
import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_task import AXES, ToyTask, assert_same

from crossattn.train import seal
from crossattn.train.checkpoint import Checkpoints, load_params, steps_in
from crossattn.train.errors import CheckpointError
from crossattn.train.optim import OptimConfig, make_optimizer
from crossattn.train.state import TrainState, init_state


@pytest.fixture(scope="module")
def state():
    optimizer, _ = make_optimizer(OptimConfig(name="muon"), 10, AXES)
    init = jax.jit(lambda key: init_state(ToyTask().init(key), optimizer, ema=True))
    return init(jax.random.key(0))


def at(state, step):
    """A state that can be told from those of other steps."""
    params = jax.tree.map(lambda x: x + step, state.params)
    return TrainState(jnp.int32(step), params, state.opt_state, state.ema)


def shapes(state):
    return jax.eval_shape(lambda: state)


@pytest.fixture
def opened(tmp_path):
    """Opens the same directory again and again; `opened.notes` is what it was told."""
    made = []

    def open_(**options):
        checkpoints = Checkpoints(tmp_path / "checkpoints", note=open_.notes.append, **options)
        made.append(checkpoints)
        return checkpoints

    open_.notes = []
    yield open_
    for checkpoints in made:
        checkpoints.close()


@pytest.fixture
def saved(opened, state):
    """A directory with the checkpoints of steps 1, 2 and 3."""
    checkpoints = opened(keep=3, best_metric="bleu")
    for step, bleu in [(1, 10.0), (2, 30.0), (3, 20.0)]:
        options = {"data_state": {"position": step}, "metrics": {"bleu": bleu}}
        checkpoints.save(step, at(state, step), **options, info={"note": "x"})
    checkpoints.wait()
    return checkpoints


def test_everything_comes_back_bit_for_bit(saved, opened, state):
    restored = opened().restore(shapes(state))
    assert_same(restored.state, at(state, 3))
    assert restored.data_state == {"position": 3}
    assert restored.info == {"note": "x"}
    assert restored.same_position


def test_data_state_may_be_bytes(opened, state):
    checkpoints = opened()
    assert checkpoints.restore(shapes(state)) is None
    checkpoints.save(1, state, data_state=b"\x00\xff")
    checkpoints.wait()
    assert checkpoints.restore(shapes(state)).data_state == b"\x00\xff"


def test_a_save_is_not_disturbed_by_what_happens_to_the_state_after(opened, state):
    checkpoints, mine = opened(), at(state, 5)
    expected = jax.device_get(mine)
    checkpoints.save(5, mine)
    jax.block_until_ready(
        jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)(mine)
    )
    checkpoints.wait()
    assert_same(checkpoints.restore(shapes(state)).state, expected)


@pytest.mark.parametrize(
    ("mode", "keep", "values", "kept"),
    [
        ("max", 2, [1.0, 9.0, float("nan"), 3.0, 2.0, None], [2, 5, 6]),
        ("min", 1, [3.0, 1.0, 2.0], [2, 3]),
    ],
)
def test_the_newest_and_the_best_stay(opened, state, tmp_path, mode, keep, values, kept):
    checkpoints = opened(keep=keep, best_metric="score", best_mode=mode)
    for step, value in enumerate(values, start=1):
        checkpoints.save(step, state, metrics=None if value is None else {"score": value})
        checkpoints.wait()
    assert checkpoints.steps == kept
    assert load_params(tmp_path / "checkpoints", shapes(state).params, step="best")[1] == 2


@pytest.mark.parametrize(("step", "expected"), [("last", 3), ("best", 2), (1, 1)])
def test_parameters_load_alone_by_name_or_number(saved, state, tmp_path, step, expected):
    directory, target = tmp_path / "checkpoints", shapes(state).params
    params, found = load_params(directory, target, step=step, average=False)
    assert found == expected
    assert_same(params, at(state, expected).params)
    assert_same(load_params(directory, target, step=step)[0], state.ema)


def files_of(directory):
    return [path for path in directory.rglob("*") if path.is_file()]


def largest(directory):
    return max(files_of(directory), key=lambda path: path.stat().st_size)


def rewrite(path, change):
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before


def flip_a_bit(data):
    half = len(data) // 2
    return data[:half] + bytes([data[half] ^ 4]) + data[half + 1 :]


def empty_it(step: Path):
    shutil.rmtree(step)
    step.mkdir()


def change_the_record(data):
    return data.replace(b'"position": 3', b'"position": 2')


def zero_every_file(step: Path):
    for path in files_of(step):
        path.write_bytes(b"\0" * path.stat().st_size)


METADATA, SEAL = "_CHECKPOINT_METADATA", "_FILES.json"
DAMAGES = {
    "a flipped bit": lambda step: rewrite(largest(step / "params"), flip_a_bit),
    "a short file": lambda step: rewrite(largest(step / "opt_state"), lambda data: data[:-50]),
    "a lost file": lambda step: largest(step / "params").unlink(),
    "garbled metadata": lambda step: (step / METADATA).write_text('{"item_handlers": {"par'),
    "lost metadata": lambda step: (step / METADATA).unlink(),
    "a lost seal": lambda step: (step / SEAL).unlink(),
    "a garbled seal": lambda step: (step / SEAL).write_text('{"a": [1,'),
    "an empty folder": empty_it,
    "another record": lambda step: rewrite(step / METADATA, change_the_record),
    "zeros": zero_every_file,
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(saved, opened, state, tmp_path, damage):
    DAMAGES[damage](tmp_path / "checkpoints" / "3")
    params, found = load_params(tmp_path / "checkpoints", shapes(state).params, average=False)
    assert found == 2
    checkpoints = opened(keep=3)
    restored = checkpoints.restore(shapes(state))
    assert_same(restored.state, at(state, 2))
    assert_same(params, restored.state.params)
    (note,) = opened.notes
    assert "step 3 cannot be read" in note and "going on from step 2" in note
    assert "\n" not in note
    assert (tmp_path / "unreadable" / "3").is_dir()
    checkpoints.save(3, at(state, 3))
    checkpoints.wait()
    assert_same(checkpoints.restore(shapes(state)).state, at(state, 3))


@pytest.fixture
def small(opened):
    """A directory with the checkpoints of steps 1 and 2 of a few numbers, and what is in them."""
    checkpoints = opened()
    states = {}
    for step in (1, 2):
        arrays = {"x": jnp.arange(3.0) + step}
        states[step] = TrainState(jnp.int32(step), arrays, {"m": jnp.ones(2)})
        checkpoints.save(step, states[step], data_state={"position": step})
    checkpoints.wait()
    return checkpoints.directory, states


def flips(path: Path, every: int):
    """Puts a file back after each of its flips."""
    whole = path.read_bytes()
    for place in {*range(0, len(whole), every), len(whole) - 1} if whole else ():
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        yield place
    path.write_bytes(whole)


# Orbax writes these when it commits, after the seal.
COMMITTED = (Path("_CHECKPOINT_METADATA"), Path("commit_success.txt"))


def test_no_flipped_bit_in_any_file_goes_unnoticed(small):
    directory, _ = small
    for path in files_of(directory / "2"):
        if path.relative_to(directory / "2") in COMMITTED:  # the next test's
            continue
        for place in flips(path, every=29):
            with pytest.raises(ValueError, match="is missing or damaged"):
                seal.check_seal(directory / "2")
                print(path, place)
    seal.check_seal(directory / "2")


@pytest.mark.slow
def test_whichever_file_is_damaged_the_checkpoint_before_is_taken(small, caplog):
    directory, states = small
    target = jax.eval_shape(lambda: states[1].params)
    for path in files_of(directory / "2"):
        unsealed = path.relative_to(directory / "2") in COMMITTED
        for _ in flips(path, every=29 if unsealed else 1 << 20):
            caplog.clear()
            params, step = load_params(directory, target)
            assert_same(params, states[step].params)
            if unsealed and step == 2:  # The bit is of a time or a path, which nothing reads.
                continue
            (said,) = caplog.messages
            assert "step 2: " in said and "taking step 1" in said and "\n" not in said
    assert load_params(directory, target)[1] == 2


def test_a_checkpoint_is_sealed_before_it_counts(opened, state):
    checkpoints = opened()
    checkpoints.save(1, state)
    while steps_in(checkpoints.directory) != [1]:
        time.sleep(0.001)
    seal.check_seal(checkpoints.directory / "1")


def test_the_best_is_not_guessed_when_a_record_is_damaged(saved, state, tmp_path):
    DAMAGES["garbled metadata"](tmp_path / "checkpoints" / "2")
    with pytest.raises(CheckpointError, match="step 2 .* which is best is not known; use 'last'"):
        load_params(tmp_path / "checkpoints", shapes(state).params, step="best")


def test_what_a_killed_run_left_half_done_is_cleaned_up(small, opened):
    directory, states = small
    shutil.copytree(directory / "2", directory / "4.orbax-checkpoint-tmp")
    assert steps_in(directory) == [1, 2]
    assert load_params(directory, shapes(states[2]).params)[1] == 2
    checkpoints = opened()
    assert checkpoints.steps == [1, 2]
    checkpoints.save(2, states[2])
    checkpoints.save(3, states[2])
    checkpoints.wait()
    assert {path.name for path in directory.iterdir()} == {"2", "3"}


def test_saving_leaves_no_descriptor_and_no_thread_behind(opened):
    checkpoints, seen = opened(), []
    for step in range(1, 25):
        arrays = {"x": jnp.full(3, step)}
        checkpoints.save(step, TrainState(jnp.int32(step), arrays, {"m": jnp.ones(2)}))
        checkpoints.wait()
        files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
        seen.append((files, threading.active_count(), threads))
    # Pools of native threads may still fill up; what is left behind by each save is 12 more of it.
    first, second = (np.max(half, axis=0) for half in (seen[:12], seen[12:]))
    assert np.all(second - first < 6), seen


def test_when_none_can_be_read_nothing_is_started_over_or_moved(saved, opened, state, tmp_path):
    for step in (1, 2, 3):
        DAMAGES["a short file"](tmp_path / "checkpoints" / str(step))
    with pytest.raises(CheckpointError, match="none of the checkpoints in .* can be read"):
        opened().restore(shapes(state))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"1", "2", "3"}


def test_another_model_is_refused(saved, opened, state):
    target = shapes(state)
    target.params["hidden"]["kernel"] = jax.ShapeDtypeStruct((8, 33), jnp.float32)
    said = r"none of the checkpoints .* hidden/kernel is float32\[8, 32\] .* float32\[8, 33\]"
    with pytest.raises(CheckpointError, match=said):
        opened().restore(target)


def test_a_missing_checkpoint_is_named(saved, state, tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint 7 .*there are \[1, 2, 3\]"):
        load_params(tmp_path / "checkpoints", shapes(state).params, step=7)
    with pytest.raises(CheckpointError, match="train first"):
        load_params(tmp_path / "elsewhere", shapes(state).params)
