"""Learning from text alone: trained, resumed, scored, sampled; what makes no sense is one line."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import t5_1b
from crossattn.data.corruption import PrefixLM, SpanCorruption
from experiments.runs import parameters
from experiments.settings import saved_config
from experiments.tasks import make_task
from experiments.tasks.denoising import objective
from experiments.tasks.watching import of_heads
from tests.experiments.conftest import ROOT, start

TINY = f"--config={ROOT}/configs/t5_1b.py:tiny"


@pytest.fixture(scope="module")
def run(tmp_path_factory, compiled_code):
    """The work directory of a finished run, which no test may change."""
    workdir = tmp_path_factory.mktemp("denoising") / "run"
    assert start("train", TINY, f"--workdir={workdir}") == 0
    return workdir


@pytest.mark.slow
def test_evaluation_gives_the_loss_in_nats_and_bits_and_some_samples(run, launched):
    code, out, _ = launched("evaluate", f"--workdir={run}", "--split=validation")
    found = json.loads((run / "results-validation.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (last,) = [line for line in map(json.loads, lines) if line["kind"] == "eval"]
    assert code == 0 and found.pop("nll_shuffled") > 0
    assert {name: last[name] for name in found} == pytest.approx(found)
    assert found["bits_per_token"] == pytest.approx(math.log2(found["perplexity"]))
    assert 0 < found["accuracy"] < 1
    for name in ("read:", "written:", "was:"):
        assert out.count(name) == 3


@pytest.mark.slow
def test_a_sample_shows_what_was_read_and_what_was_there(run):
    config = t5_1b.get_config("tiny")
    task = make_task(config, run / "assets")
    tokens = task.corpus.tokenizer.encode("the black cat sees two dogs")
    rng, text = np.random.default_rng(0), np.array(tokens, np.int32)
    ((source, target),) = task.objective.pairs([text], rng)
    read, written, was = task._described(source, target, target).splitlines()
    assert read.startswith("read:") and read.count("___") == task.objective.taken(len(text))[1]
    assert written.split(maxsplit=1)[1] == was.split(maxsplit=1)[1] == "the black cat sees two dogs"


@pytest.mark.slow
def test_heads_of_a_run_can_be_watched(run):
    """What each head does is computed on a batch of the task's own making, source and target."""
    task = make_task(saved_config(run), run / "assets")
    found = of_heads(task, parameters(task, run))
    assert found and all(np.isfinite(x).all() for own in found.values() for x in own.values())


def test_objectives_are_read_off_the_config():
    spans = objective(t5_1b.get_config().data, 32000)
    assert spans == SpanCorruption(512, 114, vocab_size=32000) and spans.text_len == 568
    assert objective(t5_1b.get_config("prefix_lm").data, 32000) == PrefixLM(512, 512)


@pytest.mark.slow
def test_places_in_a_row_are_distances_enough(run):
    """Relative positions of packed texts: the loss of the batch is that of each text in a row alone."""
    task = make_task(t5_1b.get_config("tiny,prefix_lm"), run / "assets")
    params = task.init(jax.random.key(0))
    batch = next(task.train_iterator(0, 1))
    both = task.loss(params, jax.tree.map(jnp.asarray, batch), None)[1]
    assert batch["source_segment_ids"].max() == 2
    parts = []
    for segment in (1, 2):
        only = {name: np.zeros_like(x) for name, x in batch.items()}
        for name, x in batch.items():
            for row, there in enumerate(batch[f"{name.partition('_')[0]}_segment_ids"] == segment):
                only[name][row, : there.sum()] = x[row, there]
        parts.append(task.loss(params, jax.tree.map(jnp.asarray, only), None)[1])
    for name in ("loss", "nll", "weight"):
        together = parts[0][name] + parts[1][name]
        np.testing.assert_allclose(both[name], together, rtol=1e-5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sentinels=1", "config.data: a text of 52 tokens has 3 spans, and there are 1"),
        ("target_len=9", "config.data: target_len is 9; what is taken out of 52 tokens"),
        ("source_len=4", "config.data: source_len 4 and target_len 16 leave room for"),
        ("objective=magic", "objective is 'magic'; expected one of span_corruption"),
        ("density=1", "data.density is 1.0; expected a number, above 0 and below 1"),
        ("mode=pack", "the config has no key data.mode;"),
        ("side=both", "side is 'both'; expected one of source, target"),
        ("name=text:no.txt", "no.txt cannot be read"),
    ],
)
def test_a_wrong_value_is_one_line_before_anything_is_made(
    refused, in_production, tmp_path, override, said
):
    change = f"--config.data.{override}"
    assert said in refused("train", TINY, change, f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_text_file_of_ones_own_is_learnt(launched, tmp_path):
    (tmp_path / "a.txt").write_text("the black cat sees the small dog\n" * 60)
    given = (TINY, f"--config.data.name=text:{tmp_path}/a.txt", "--config.train.steps=2")
    code, out, err = launched("train", *given, f"--workdir={tmp_path / 'run'}")
    assert code == 0 and "evaluation at step 2" in out, err
