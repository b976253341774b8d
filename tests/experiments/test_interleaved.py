"""Captions after pictures: how rows are made, and a language model that learns to read images after text."""

import json

import jax
import numpy as np
import pytest

from configs import emoji_flamingo, emoji_llava
from crossattn.data.sources import open_source
from crossattn.functional import flatten
from experiments.errors import SettingsError
from experiments.settings import check
from experiments.tasks.interleaved import IMAGE, InterleavedTask, interleaved
from tests.experiments.conftest import ROOT

CONFIG = f"--config={ROOT}/configs/emoji_flamingo.py"
SHORT = ("--config.train.steps=4", "--config.checkpoint.every=4", "--config.model.layers=1")


def test_a_row_is_pictures_and_captions_in_turn():
    captions = np.array([[5, 6, 2, 0], [7, 2, 0, 0], [8, 9, 9, 2], [4, 2, 0, 0]])
    images = np.arange(4, dtype=np.float32).reshape(4, 1, 1, 1)
    batch = {
        "caption": captions,
        "caption_segment_ids": (captions > 0).astype(np.int32),
        "image": images,
        "valid": np.array([1, 1, 1, 0]),
    }
    rows = interleaved(batch, 2)
    assert rows["target_in"].tolist() == [
        [1, IMAGE, 5, 6, 2, IMAGE, 7, 2, 0, 0],
        [1, IMAGE, 8, 9, 9, 2, 0, 0, 0, 0],
    ]
    assert rows["target_out"].tolist() == [
        [IMAGE, 5, 6, 2, IMAGE, 7, 2, 0, 0, 0],
        [IMAGE, 8, 9, 9, 2, 0, 0, 0, 0, 0],
    ]
    assert rows["shots"].tolist() == [
        [-1, 0, 0, 0, -1, 1, 1, -1, -1, -1],
        [-1, 0, 0, 0, 0, -1, -1, -1, -1, -1],
    ]
    assert rows["image_positions"].tolist() == [[1, 5], [1, -1]]
    assert rows["images"].shape == (2, 2, 1, 1, 1) and rows["images"].ravel().tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert rows["target_segment_ids"].sum(-1).tolist() == [8, 6]


def test_an_image_may_take_several_places():
    batch = {
        "caption": np.array([[5, 2], [7, 2]]),
        "caption_segment_ids": np.ones((2, 2), np.int32),
        "image": np.zeros((2, 1, 1, 1), np.float32),
        "valid": np.array([1, 1]),
    }
    rows = interleaved(batch, 2, image_tokens=3)
    three = [IMAGE] * 3
    assert rows["target_in"].tolist() == [[1, *three, 5, 2, *three, 7]]
    assert rows["target_out"].tolist() == [[*three, 5, 2, *three, 7, 2]]
    assert rows["shots"].tolist() == [[-1, -1, -1, 0, 0, -1, -1, -1, 1, 1]]
    assert rows["image_positions"].tolist() == [[1, 6]]


def test_gates_and_resampler_alone_learn_on_a_language_model_that_stays_as_it_is(
    launched, parameters, tmp_path
):
    text_run, workdir = tmp_path / "text", tmp_path / "run"
    code, _, err = launched("train", f"{CONFIG}:text,tiny", *SHORT, f"--workdir={text_run}")
    assert code == 0, err
    arguments = (
        f"{CONFIG}:gated,tiny",
        *SHORT,
        f"--config.init.from={text_run}",
        "--config.model.interval=1",
    )
    code, _, err = launched("train", *arguments, f"--workdir={workdir}")
    assert code == 0, err
    before, after = flatten(parameters(text_run)), flatten(parameters(workdir))
    for name, x in before.items():
        np.testing.assert_array_equal(x, after[name], name)
    gates = [x for name, x in after.items() if name.endswith("gate")]
    assert len(gates) == 2 and all(gates)
    *_, last = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert last["nll"] != last["nll_shuffled"] and {"nll_0", "nll_2"} <= last.keys()


@pytest.mark.parametrize("config", [emoji_flamingo, emoji_llava])
def test_captions_are_told_without_an_example_and_with_some(config):
    task = InterleavedTask(config.get_config("tiny"))
    told = task.samples(jax.jit(task.init)(jax.random.key(0)), "validation")
    assert len(told) == 4 and all(line.count(" | ") == 2 for line in told)
    captions = {example["caption"] for example in open_source("shapes", "validation")}
    assert {line.rpartition(" | ")[2] for line in told} <= captions


def test_pictures_that_are_smaller_than_a_patch_are_refused_before_anything_is_computed():
    config = emoji_llava.get_config("tiny")
    config.data.height = 2
    with pytest.raises(SettingsError, match="config.model: a picture of 8 x 2 pixels has no patch"):
        check(config)
