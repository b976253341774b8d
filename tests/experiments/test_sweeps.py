"""Seeds and sweeps from the command line: trained as one program, evaluated each, or one after the other."""

import json

import numpy as np
import pytest

from configs import emoji_captions, emoji_group, speech
from crossattn.data.examples import FeatureExamples
from crossattn.train.records import read_run
from experiments import launch
from experiments.tasks import make_task
from experiments.train import split_sweep
from tests.conftest import with_devices
from tests.experiments.conftest import ROOT

COPY = f"--config={ROOT}/configs/copy_task.py:tiny"
QUICK = ("--config.train.steps=2", "--config.evaluate.examples=0", "--config.train.log_every=1")


def test_a_sweep_is_one_program_where_shapes_stay():
    found = split_sweep(["optim.learning_rate=1,2", "model.dim=32,64", "optim.b1=0.9"])
    assert found == (["optim.learning_rate=1,2", "optim.b1=0.9"], {"model.dim": ["32", "64"]})


@pytest.mark.parametrize("sweeps", [["model.dim"], ["a=1,1"], ["a=1,"], ["a=1", "a=2"]])
def test_a_sweep_that_is_none_is_refused(sweeps):
    with pytest.raises(launch.Refused, match="--sweep"):
        split_sweep(sweeps)


@pytest.mark.parametrize("module", [emoji_group, emoji_captions, speech])
def test_seeds_prepare_an_example_once_and_have_the_batches_of_each_alone(module, monkeypatch):
    config, prepared = module.get_config("tiny"), []
    one = FeatureExamples._prepared
    monkeypatch.setattr(
        FeatureExamples,
        "_prepared",
        lambda self, example: prepared.append(example["id"]) or one(self, example),
    )
    task = make_task(config)
    both = task.train_iterators([0, 1], 0, 1)
    epoch = -(-both[0].examples // config.data.batch_size)
    asked = len(prepared)  # by fingerprints
    found = [[next(iterator) for iterator in both] for _ in range(epoch)]
    # Two threads may prepare one example at the same time; 2 times as many would be no sharing.
    assert len(prepared) - asked <= 1.2 * both[0].examples
    for seed in (0, 1):
        config.seed = seed
        (alone,) = make_task(config).train_iterators([seed], 0, 1)
        for batches in found:
            own = next(alone)
            assert all(np.array_equal(own[name], x) for name, x in batches[seed].items())
        alone.close()
    for iterator in both:
        iterator.close()


@pytest.mark.slow
def test_members_are_trained_evaluated_and_taken_out(launched, refused, tmp_path):
    named = f"--workdir={tmp_path / 'run'}"
    sweep = "--sweep=optim.learning_rate=1e-3,2e-3"
    code, out, err = launched("train", COPY, named, sweep, "--config.train.seeds=2", *QUICK)
    assert code == 0, err
    names = [f"learning_rate_{rate}_seed_{seed}" for rate in (0.001, 0.002) for seed in (0, 1)]
    run = read_run(tmp_path / "run")
    assert run.members("nll") == names and run.settings["train.seeds"] == 2
    code, _, err = launched("evaluate", named, "--limit=4", "--baselines")
    assert code == 0, err
    found = json.loads((tmp_path / "run" / "results-test.json").read_text())
    each = [found[f"{name}/nll"] for name in names]
    assert 0 < found["baseline_trigrams_nll"] < found["nll"] and found["nll_shuffled"] > 0
    assert found["nll"] == pytest.approx(sum(each) / 4) and len(set(each)) == 4
    # Texts have no mean: each member keeps its own.
    columns = {"source", "reference", *(f"{name}/translation" for name in names)}
    assert len(found["samples"]) == 4 and all(set(x) == columns for x in found["samples"])
    assert found["step"] == 2 and "not of its first 4" in err
    code, _, err = launched("evaluate", named, "--limit=4", f"--member={names[2]}")
    alone = json.loads((tmp_path / "run" / "results-test.json").read_text())
    assert code == 0 and alone["nll"] == pytest.approx(each[2]), err
    assert alone["member"] == names[2]
    texts = [x[f"{names[2]}/translation"] for x in found["samples"]]
    assert [x["translation"] for x in alone["samples"]] == texts
    assert "expected one of the run's: learning_rate_0.001_seed_0," in refused(
        "evaluate", named, "--member=seed_9"
    )
    new = f"--workdir={tmp_path / 'new'}"
    assert "optim.b1 1.5; expected a number" in refused(
        "train", COPY, new, "--sweep=optim.b1=0.9,1.5", *QUICK
    )
    assert "optim.b1, which sgd does not use" in refused(
        "train", COPY, new, "--sweep=optim.b1=0.8,0.9", "--config.optim.name=sgd", *QUICK
    )


def test_a_value_that_no_key_takes_is_refused_before_the_first_run(refused, tmp_path):
    named = f"--workdir={tmp_path / 'run'}"
    assert "no key model.dims" in refused("train", COPY, named, "--sweep=model.dims=1,2")
    said = refused("train", COPY, named, "--sweep=model.encoder_layers=1,many", *QUICK)
    assert "model.encoder_layers is 'many'; expected a whole number" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_values_that_change_shapes_are_trained_one_after_the_other(launched, tmp_path, monkeypatch):
    for name, value in with_devices(1).items():  # each value is a process of its own
        monkeypatch.setenv(name, value)
    code, out, err = launched(
        "train", COPY, f"--workdir={tmp_path}", "--sweep=model.encoder_layers=1,2", *QUICK
    )
    assert code == 0, err
    for layers in (1, 2):
        run = read_run(tmp_path / f"model.encoder_layers={layers}")
        assert run.settings["model.encoder_layers"] == layers
        assert run.curve("eval", "loss")[0] == [2]
