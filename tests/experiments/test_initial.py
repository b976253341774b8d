"""A run that begins with what another has learnt, or with published weights."""

import jax
import numpy as np
import pytest

import crossattn as xa
from crossattn.functional import flatten
from experiments.runs import parameters as read
from experiments.settings import saved_config
from experiments.tasks import make_task
from tests.experiments.conftest import TINY
from tests.weights import checkpoints

SHORT = ("--config.train.steps=2", "--config.evaluate.examples=0")
STILL = (*SHORT, "--config.optim.learning_rate=0", "--config.optim.weight_decay=0")
SIZES = dict(d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=40)
CROSS = r"--config.optim.train=\.cross\."


@pytest.mark.slow
def test_only_cross_attention_of_a_trained_model_is_trained_on(
    tiny_run, launched, parameters, tmp_path
):
    workdir = tmp_path / "run"
    arguments = (TINY, *SHORT, f"--workdir={workdir}", f"--config.init.from={tiny_run}")
    code, _, err = launched("train", *arguments, CROSS)
    assert code == 0, err
    before, after = flatten(parameters(tiny_run)), flatten(parameters(workdir))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed and changed == {name for name in before if ".cross." in name}
    for name in ("tokenizer.json", "sha256.json"):
        assert (workdir / "assets" / name).read_bytes() == (tiny_run / "assets" / name).read_bytes()
    code, out, _ = launched("train", *arguments, CROSS, "--config.train.steps=3")
    assert code == 0 and "going on from the checkpoint of step 2" in out


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_with_the_same(
    tiny_run, launched, parameters, tmp_path
):
    workdir = tmp_path / "run"
    (workdir / "checkpoints").mkdir(parents=True)  # made before the first step
    begin = f"--config.init.from={tiny_run}"
    code, _, err = launched("train", TINY, *STILL, begin, f"--workdir={workdir}")
    assert code == 0, err
    before, after = flatten(parameters(tiny_run)), flatten(parameters(workdir))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.slow
def test_what_does_not_fit_is_named_before_a_folder_is_claimed(tiny_run, refused, tmp_path):
    def said(*changes):
        workdir = tmp_path / "run"
        source = f"--config.init.from={tiny_run}"
        text = refused("train", TINY, *SHORT, source, f"--workdir={workdir}", *changes)
        assert not workdir.exists()
        return text

    more = "--config.model.decoder_layers=2"
    assert "lacks decoder.stack.layers.1." in said(more) and "init.new" in said(more)
    assert "which the model has not" in said("--config.init.rename=^decoder=writer")
    assert "of shape [64, 32], the model [48, 32]" in said("--config.model.mlp_dim=48")
    assert "found in no name" in said("--config.init.take=nothing")
    assert "no regular expression" in said("--config.init.new=(")


@pytest.mark.slow
def test_what_is_new_begins_afresh_and_the_rest_as_it_was(tiny_run, launched, parameters, tmp_path):
    more = ("--config.model.decoder_layers=2", r"--config.init.new=layers\.1\.")
    workdir = f"--workdir={tmp_path / 'run'}"
    code, _, err = launched("train", TINY, *STILL, f"--config.init.from={tiny_run}", *more, workdir)
    assert code == 0, err
    before, after = flatten(parameters(tiny_run)), flatten(parameters(tmp_path / "run"))
    assert {name for name in after if name not in before} == {n for n in after if ".layers.1." in n}
    jax.tree.map(np.testing.assert_array_equal, before, {name: after[name] for name in before})


@pytest.mark.slow
def test_a_run_may_begin_from_an_earlier_checkpoint(tiny_run, launched, refused, tmp_path):
    arguments = (TINY, *STILL, f"--config.init.from={tiny_run}")
    run = tmp_path / "run"
    code, _, err = launched("train", *arguments, "--config.init.step=28", f"--workdir={run}")
    assert code == 0, err
    task = make_task(saved_config(run), run / "assets")
    found, early, late = (
        flatten(jax.device_get(read(task, folder, step)))
        for folder, step in ((run, "last"), (tiny_run, "28"), (tiny_run, "last"))
    )
    jax.tree.map(np.testing.assert_array_equal, found, early)
    assert any(not np.array_equal(x, late[name]) for name, x in found.items())
    workdir = f"--workdir={tmp_path}/other"
    assert "no checkpoint 1 in" in refused("train", *arguments, "--config.init.step=1", workdir)
    tiny = "--config.init.from=tiny:t5"
    said = refused("train", *arguments, tiny, "--config.init.step=best", workdir)
    assert "config.init.step is 'best', but tiny:t5 is no run" in said


@pytest.mark.slow
def test_published_weights_bring_all_but_the_tables_of_their_tokens(
    tiny_run, launched, refused, parameters, tmp_path
):
    tokens = parameters(tiny_run)["target_input"]["embedding"]["table"].shape[0]
    model = xa.weights.describe(checkpoints.BART | SIZES | {"vocab_size": tokens})
    params = xa.init(model, jax.random.key(1))
    weights = xa.weights.save(tmp_path / "weights", model, params)
    arguments = (TINY, *STILL, f"--config.init.from={weights}", f"--workdir={tmp_path / 'run'}")

    def only(pattern):
        return f"--config.init.take={pattern}", f"--config.init.new=^(?!.*{pattern})"

    assert "belong to its tokenizer" in refused("train", *arguments, *only("embedding"))
    code, _, err = launched("train", *arguments, *only("feedforward"))
    assert code == 0, err
    given, after = flatten(params), flatten(parameters(tmp_path / "run"))
    own = [name for name in after if "feedforward" in name]
    assert own and all(np.array_equal(given[name], after[name]) for name in own)
