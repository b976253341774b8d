"""Attention is watched at evaluations, and a run that is watched is the run that is not."""

import json

import jax
import numpy as np
import pytest

from experiments.runs import parameters as parameters_of
from experiments.settings import saved_config
from experiments.tasks import make_task, watching
from tests.experiments.conftest import STEPS, TINY, start
from tests.peers import package

WATCHED = (*STEPS, "--config.train.attention_stats=True", "--config.train.eval_every=16")
KINDS = {"entropy", "first", "last", "padding", "diagonality", "links"}
SITES = {"encoder.attention", "decoder.attention", "decoder.cross"}


@pytest.mark.slow
def test_evaluations_log_and_draw_what_heads_do_and_training_is_as_without(
    tiny_run, parameters, tmp_path
):
    package("matplotlib", "viz")
    assert start("train", TINY, *WATCHED, f"--workdir={tmp_path}") == 0
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path), parameters(tiny_run))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    logged = {line["step"]: line for line in lines if line["kind"] == "eval"}
    assert list(logged) == [16, 32]
    for step, line in logged.items():
        own = {
            tuple(name.split("/")[1:]): x
            for name, x in line.items()
            if name.startswith("attention/")
        }
        assert own.keys() == {(site, kind) for site in SITES for kind in KINDS}
        assert all(own[site, "padding"] == 0 and own[site, "entropy"] > 0 for site in SITES)
        assert (tmp_path / "attention" / f"{step}.png").stat().st_size > 5000
    entropy = "attention/decoder.cross/entropy"
    assert logged[16][entropy] != logged[32][entropy]


@pytest.mark.slow
def test_padding_that_is_read_is_counted(tiny_run, monkeypatch):
    """The share of weight on padding is 0 by a mask alone: without one, the statistic shows it."""
    task = make_task(saved_config(tiny_run), tiny_run / "assets")
    params = parameters_of(task, tiny_run)
    read = task.read_source

    def unmasked(model, batch, key, **options):
        seen = {
            name: x * 0 + 1 if name.endswith("_segment_ids") else x for name, x in batch.items()
        }
        return read(model, seen, key, **options)

    monkeypatch.setattr(task, "read_source", unmasked)
    watching._program.cache_clear()
    found = watching.of_heads(task, params)
    assert all(np.all(own["padding"] > 0) for own in found.values())
