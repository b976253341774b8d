"""Captions after examples, drawn: which rows, the attention to the last picture, and colours over it."""

import sys

import jax
import matplotlib
import numpy as np
import pytest

from configs import emoji_flamingo, emoji_llava
from crossattn.data.sources import open_source
from experiments import train
from experiments.bench import shots
from experiments.tasks.interleaved import InterleavedTask


@pytest.fixture(scope="module", params=[emoji_flamingo, emoji_llava])
def task(request):
    return InterleavedTask(request.param.get_config("tiny"))


@pytest.fixture(scope="module")
def params(task):
    return jax.jit(task.init)(jax.random.key(0))


@pytest.mark.slow
def test_rows_end_in_the_examples_that_an_evaluation_scores(task, params):
    rows = shots.written_after(task, params, "validation", 3)
    after, alone = (task.texts(params, "validation", count, 3) for count in (2, 0))
    examples = open_source("shapes", "validation")
    assert [row.written for row in rows] == [*after.values()]
    assert [row.right for row in rows] == [examples[number]["caption"] for number in after]
    assert [row.alone for row in rows] == [*alone.values()]
    captions = {example["caption"] for example in examples}
    for row in rows:
        assert len(row.images) == 3 and len(row.told) == 2 and {*row.told} <= captions


@pytest.mark.slow
def test_attention_is_that_of_the_tokens_of_the_last_caption(task, params):
    """A row of one picture is what a caption alone reads, whose weights the task computes by itself."""
    example = open_source("shapes", "validation")[0]
    read = shots.reader(task, params)
    found = read(shots.Shots([example["image"]], [], example["caption"], "", ""))
    ids = task.features["target"].prepare(example["caption"]).tolist()
    tokens = np.array([[*task.prompt_in(None), *ids]], np.int32)
    source = task.features["source"].prepare(example["image"])[None]
    first = len(task.prompt_in(None)) - 1
    known = task.read_weights(params)(source, tokens)[0, first:]
    assert len(known) == len(ids) > 2
    np.testing.assert_allclose(found, known[:-1].mean(0), rtol=1e-5)
    ended = read(shots.Shots([example["image"]], [], "", "", ""))
    np.testing.assert_allclose(ended, known[0], rtol=1e-5)


@pytest.mark.slow
def test_attention_is_to_the_last_picture(task, params):
    examples = open_source("shapes", "validation")
    own, other = (examples[number]["image"] for number in (0, 1))
    read = shots.reader(task, params)
    found = read(shots.Shots([own, other], ["a"], "a circle", "", ""))
    same = read(shots.Shots([other, other], ["a"], "a circle", "", ""))
    further = read(shots.Shots([own, own], ["a"], "a circle", "", ""))
    assert np.abs(found - further).max() > np.abs(found - same).max()


def test_colours_are_over_the_patch_that_is_read():
    image = np.ones((4, 8, 3))
    found = shots.shaded(image, np.array([[0.0, 0.5]]))
    colours = np.array([matplotlib.colormaps["inferno"](x)[:3] for x in (0.0, 1.0)])
    np.testing.assert_allclose(found[:, :4], np.broadcast_to(0.35 + 0.65 * colours[0], (4, 4, 3)))
    np.testing.assert_allclose(found[:, 4:], np.broadcast_to(0.35 + 0.65 * colours[1], (4, 4, 3)))


@pytest.mark.slow
def test_the_command_prints_and_draws_rows_and_refuses_other_runs(tmp_path, capsys, monkeypatch):
    for kind, name in (("tiny", "sees"), ("text,tiny", "text")):
        config = emoji_flamingo.get_config(kind)
        config.train.steps = 1
        train.run(config, tmp_path / name)
    plot = tmp_path / "shots.png"

    def start(run, *words):
        monkeypatch.setattr(sys, "argv", ["shots", str(tmp_path / run), "--limit=2", *words])
        shots.main()

    capsys.readouterr()
    start("sees", "--rows=2", f"--plot={plot}")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1. ") and sum(" | right: " in line for line in lines) == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    for run, words, said in (
        ("sees", ["--rows=3", f"--plot={plot}"], "--rows has 3; expected numbers from 1 to 2."),
        ("sees", ["--limit=0"], "--limit is 0; expected 1 or more."),
        ("sees", ["--plot=a.txt"], "--plot names a.txt; expected one of "),
        ("text", [], "expected an interleaved whose model reads pictures."),
    ):
        with pytest.raises(SystemExit):
            start(run, *words)
        assert said in capsys.readouterr().err
