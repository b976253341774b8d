"""A run in gs://, where nothing is renamed or appended to, keeps the promises of one on a disk."""

import json
import shutil

import pytest
from toy_task import Log, ToyTask, assert_same, param_shapes

from crossattn.train import storage
from crossattn.train.checkpoint import load_params, steps_in
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.errors import MissingPackage, TrainError, WorkdirMismatch
from crossattn.train.loop import train
from crossattn.train.optim import OptimConfig
from crossattn.train.writers import Jsonl, TensorBoard


def run(workdir, steps=8, seed=0, resume="auto", log=None):
    config = TrainConfig(
        steps=steps,
        optim=OptimConfig(learning_rate=0.05),
        log_every=2,
        seed=seed,
        checkpoint=CheckpointConfig(every=3, keep=2, resume=resume),
    )
    workdir = storage.folder(workdir)
    writers = [log or Log(), Jsonl(workdir / "metrics.jsonl")]
    writers.append(TensorBoard(workdir / "tensorboard"))
    return train(ToyTask(), config, workdir, writers=writers)


def losses(workdir):
    lines = (storage.folder(workdir) / "metrics.jsonl").read_text().splitlines()
    found = map(json.loads, lines)
    return [(line["step"], line["kind"], line.get("loss"), line.get("accuracy")) for line in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on this machine: (its work directory, its state)."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, run(workdir).state


@pytest.mark.slow
def test_a_run_in_a_store_is_the_run_on_a_disk(store, whole):
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    workdir, state = whole
    assert_same(run(store).state, state)
    assert losses(store) == losses(workdir)
    assert run(store).status == "already finished"
    folder = storage.folder(store)
    assert steps_in(folder / "checkpoints") == [6, 8]
    assert_same(load_params(folder / "checkpoints", param_shapes())[0], state.params)
    assert (folder / "assets" / "vocabulary.txt").read_text() == "16"
    events = storage.local_copy(folder / "tensorboard")
    scalars = accumulator.EventAccumulator(str(events)).Reload().Scalars("train/loss")
    assert [each.step for each in scalars] == [2, 4, 6, 8]


@pytest.fixture
def copied(store, whole):
    """A new folder in a store with what a finished run left on this machine."""
    with storage.filled(storage.folder(store)) as folder:
        shutil.copytree(whole[0], folder, dirs_exist_ok=True)
    return storage.folder(store)


@pytest.mark.slow
def test_a_run_copied_from_a_disk_goes_on_and_forgets_what_it_has_not_reached(copied, whole):
    assert load_params(copied / "checkpoints", param_shapes())[1] == 8
    storage.delete(copied / "checkpoints" / "8")
    log = Log()
    assert_same(run(copied, log=log).state, whole[1])
    assert "going on from the checkpoint of step 6" in log.notes
    assert losses(copied) == losses(whole[0])
    assert steps_in(copied / "checkpoints") == [6, 8]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["short", "gone", "no seal"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(copied, whole, damage):
    newest = copied / "checkpoints" / "8"
    path = newest / "_FILES.json"
    if damage != "no seal":
        path = newest / "params" / "d" / max(storage.sizes(newest / "params" / "d"))
    data = path.read_bytes()
    storage.delete(path)
    if damage == "short":
        path.write_bytes(data[:-1])
    log = Log()
    assert_same(run(copied, log=log).state, whole[1])
    assert "checkpoint of step 8 cannot be read" in log.notes[0]
    assert steps_in(copied / "unreadable") == [8]


@pytest.mark.slow
@pytest.mark.parametrize("written", ["all but the commit", "metadata"])
def test_a_checkpoint_that_was_not_committed_is_none(copied, whole, written):
    """A run killed while it wrote its only checkpoint begins anew: nothing was lost."""
    storage.delete(copied / "checkpoints" / "6")
    only = copied / "checkpoints" / "8"
    for name in storage.sizes(only):
        if name == "commit_success.txt" or (
            written == "metadata" and name != "_CHECKPOINT_METADATA"
        ):
            storage.delete(only / name)
    log = Log()
    assert_same(run(copied, log=log).state, whole[1])
    assert not [line for line in log.notes if "cannot be read" in line or "going on" in line]
    assert steps_in(copied / "checkpoints") == [6, 8]


@pytest.mark.slow
def test_resume_never_puts_the_old_run_aside(copied, whole):
    with pytest.raises(WorkdirMismatch, match="seed was 0, is 1"):
        run(copied, seed=1)
    run(copied, seed=1, steps=2, resume="never")
    aside = copied / "previous-1"
    assert losses(aside) == losses(whole[0])
    assert_same(load_params(aside / "checkpoints", param_shapes())[0], whole[1].params)
    assert losses(copied)[-1][0] == 2 and steps_in(copied / "checkpoints") == [2]


def test_a_bucket_that_is_not_there_is_one_sentence(store):
    missing = store.replace("bucket", "nobucket")
    with pytest.raises(TrainError, match="nobucket.* cannot be written: .*name another"):
        run(missing)


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"gcsfs: pip install 'crossattn\[gcs\]'"):
        storage.folder("gs://bucket/run")
