"""A run of an encoder-decoder that begins with the weights of an encoder, or of a part of them."""

import jax
import numpy as np
import pytest

import crossattn as xa
from configs import warm_start
from crossattn.functional import flatten
from experiments import tiny_checkpoints
from experiments.initial import initial
from experiments.tasks import make_task
from tests.experiments.conftest import ROOT
from tests.peers import package

CONFIG = f"--config={ROOT}/configs/warm_start.py:tiny"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Returns the parameters of the encoder that runs begin with, by the names in its checkpoint."""
    return flatten(xa.load(tiny_checkpoints.write("bert", tmp_path_factory.mktemp("bert")))[1])


@pytest.mark.parametrize("variant", ["both", "encoder", "scratch"])
def test_a_run_begins_with_what_its_variant_takes(variant, given):
    """Compares each parameter with that of the checkpoint and with that of a run that begins afresh."""
    config = warm_start.get_config(f"{variant},tiny")
    config.seed = 7
    task = make_task(config)
    fresh = task.init(jax.random.key(7))
    begin = initial(config, task)
    assert begin is not None
    flat, own = flatten(begin(fresh)), flatten(fresh)
    taken = {}
    for name in flat:
        half, _, rest = name.partition(".")
        there = rest.replace("decoder.stack.", "encoder.") if half == "decoder" else rest
        wanted = half == "encoder" if variant == "encoder" else variant == "both"
        if wanted and there in given and not name.startswith("decoder.output"):
            taken[name] = given[there]
    halves = {name.partition(".")[0] for name in taken}
    assert halves == dict(both={"encoder", "decoder"}, encoder={"encoder"}, scratch=set())[variant]
    for name, value in flat.items():
        np.testing.assert_array_equal(value, taken.get(name, own[name]), err_msg=name)
    assert any("cross." in name for name in flat.keys() - taken.keys())


def test_what_makes_no_pair_is_refused_in_one_line(refused, tmp_path):
    def said(source):
        workdir = tmp_path / "run"
        text = refused("train", CONFIG, f"--config.init.from={source}", f"--workdir={workdir}")
        assert not workdir.exists()
        return text

    assert "holds a gpt2, which cannot be the encoder of a pair" in said("pair:tiny:gpt2")
    assert "holds a gpt2, which cannot be the decoder" in said("pair:tiny:bert+tiny:gpt2")
    picture = "pair:tiny:vision-encoder-decoder"
    assert "holds a vision-encoder-decoder, which cannot be the encoder" in said(picture)
    assert "expected tiny: and one of" in said("pair:tiny:bert+tiny:gemma")


@pytest.mark.slow
def test_a_run_is_scored_and_exported_as_a_pair_of_transformers(launched, parameters, tmp_path):
    workdir = tmp_path / "run"
    steps = ("--config.train.steps=2", "--config.checkpoint.every=2")
    code, _, err = launched("train", CONFIG, *steps, f"--workdir={workdir}")
    assert code == 0, err
    code, out, err = launched("evaluate", f"--workdir={workdir}", "--limit=4", "--baselines")
    assert code == 0 and "baseline_nearest_chrf" in out, err
    code, _, err = launched("export", f"--workdir={workdir}", f"--to={tmp_path / 'new'}")
    assert code == 0, err
    _, params, tokenizer = xa.load(tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, flatten(params), flatten(parameters(workdir)))
    assert tokenizer is not None


def test_copied_translations_are_the_baselines(monkeypatch):
    """A copy of the only sentence that shares words is right; the most frequent one is not."""
    package("sklearn", "baselines")
    task = make_task(warm_start.get_config("tiny"))
    splits = {
        "train": [("a black cat sees", "un chat noir voit"), ("the sun", "oui"), ("it is", "oui")],
        "test": [("a cat sees", "un chat noir voit")],
    }
    task.examples = lambda split, limit=None: [
        dict(id=str(i), source=s, target=t) for i, (s, t) in enumerate(splits[split])
    ]
    monkeypatch.setattr(type(task).__mro__[1], "baselines", lambda self, split: {})
    found = task.baselines("test")
    assert found["nearest_bleu"] == pytest.approx(100) and found["nearest_chrf"] == pytest.approx(
        100
    )
    assert found["most_frequent_bleu"] < 1 and found["most_frequent_chrf"] < 20
    names = ("nearest", "most_frequent", "word_by_word")
    assert {*found} == {f"{name}_{metric}" for name in names for metric in ("bleu", "chrf")}
