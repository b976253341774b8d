"""Captions after pictures: how rows are made, a language model that learns to see, and what it writes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import emoji_flamingo, emoji_llava
from crossattn.data.sources import open_source
from crossattn.functional import flatten
from experiments import train
from experiments.errors import SettingsError
from experiments.settings import check
from experiments.tasks.augmentation import augmented_as
from experiments.tasks.interleaved import IMAGE, InterleavedTask, interleaved
from tests.experiments.conftest import ROOT

CONFIG = f"--config={ROOT}/configs/emoji_flamingo.py"
SHORT = ("--config.train.steps=4", "--config.checkpoint.every=4", "--config.model.layers=1")


@pytest.fixture(scope="module")
def task():
    return InterleavedTask(emoji_flamingo.get_config("tiny"))


@pytest.fixture(scope="module")
def params(task):
    """Drawn at random, with gates that are open."""
    rng = np.random.default_rng(0)
    fresh = jax.jit(task.init)(jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(x.dtype), fresh)


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
    assert rows["images"].shape == (2, 2, 1, 1, 1)
    assert rows["images"].ravel().tolist() == [0, 1, 2, 3]
    assert rows["target_segment_ids"].sum(-1).tolist() == [8, 6]
    first = {name: x[:2] for name, x in batch.items()}
    rows, three = interleaved(first, 2, image_tokens=3), [IMAGE] * 3
    assert rows["target_in"].tolist() == [[1, *three, 5, 6, 2, *three, 7, 2, 0, 0]]
    assert rows["shots"].tolist() == [[*[-1] * 3, *[0] * 3, *[-1] * 3, 1, 1, *[-1] * 3]]
    assert rows["image_positions"].tolist() == [[1, 7]]


@pytest.mark.slow
def test_gates_and_resampler_alone_learn_on_a_language_model_that_stays_as_it_is(
    launched, parameters, refused, tmp_path
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
    said = refused("caption", f"--workdir={text_run}", str(tmp_path / "a.png"))
    assert "config.model.name is 'decoder', which reads no pictures" in said
    *_, last = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert last["nll"] != last["nll_shuffled"]


@pytest.mark.parametrize("config", [emoji_flamingo, emoji_llava])
def test_captions_are_told_without_an_example_and_with_some(config):
    task = InterleavedTask(config.get_config("tiny"))
    told = task.samples(jax.jit(task.init)(jax.random.key(0)), "validation")
    assert len(told) == 4 and all(line.count(" | ") == 2 for line in told)
    captions = {example["caption"] for example in open_source("shapes", "validation")}
    assert {line.rpartition(" | ")[2] for line in told} <= captions


def test_losses_after_examples_are_of_every_caption_and_those_before_it(task, params):
    report = task.report(params, "validation", limit=5)
    examples = open_source("shapes", "validation")
    order = np.random.default_rng(0).permutation(len(examples)).tolist()
    prepared = [task.features["source"].prepare(x["image"]) for x in examples]
    ids = [task.features["target"].prepare(x["caption"]).tolist() for x in examples]
    width = 1 + 3 * task.config.data.text_len + 3
    logits = jax.jit(
        lambda p, tokens, images, places: task.bind(p)(
            tokens, images=images, image_positions=places
        )
    )

    def nll(count, last, shown):
        """Of one caption after others, told by a row of its own."""
        tokens, places, images = [1], [], []
        for i in [*range(last - count, last), last]:
            places.append(len(tokens))
            images.append(prepared[order[shown if i == last else i]])
            tokens += [IMAGE, *ids[order[i]]]
        end = len(tokens)
        images += [images[0]] * (3 - len(images))
        places += [-1] * (3 - len(places))
        row = jnp.asarray([tokens + [0] * (width - end)])
        found = np.asarray(logits(params, row, np.stack(images)[None], np.array([places])), float)[
            0
        ]
        own = range(end - len(ids[order[last]]), end)
        return sum(np.log(np.exp(found[t - 1]).sum()) - found[t - 1, tokens[t]] for t in own)

    weight = sum(len(ids[order[i]]) for i in range(5))
    for count in (0, 2):
        for name, step in (("", 0), ("_shuffled", 1)):
            expected = sum(nll(count, i, i + step) for i in range(5)) / weight
            assert report[f"nll_{count}_shot{name}"] == pytest.approx(expected, rel=1e-4)
    assert report["nll_2_shot"] != report["nll_2_shot_shuffled"]
    assert "nll_4_shot" not in report and 0 <= report["chrf_2_shot"] <= 100
    assert "nll" in report and "nll_shuffled" in report


def test_a_caption_is_the_likeliest_after_its_prompt(task, params):
    said, right = task.texts(params, "validation", 2, 3)
    examples = open_source("shapes", "validation")
    order = np.random.default_rng(0).permutation(len(examples)).tolist()
    assert right == [examples[order[i]]["caption"] for i in range(3)]
    source = task.features["source"].prepare(examples[0]["image"])[None]
    prompt = np.array([task.prompt_in(None)], np.int32)
    ids = task.writer(params)(source, prompt)[0].tolist()
    model, tokens = task.bind(params), np.concatenate([prompt, [ids]], 1)
    given = dict(images=source[:, None], image_positions=np.array([[1]]))
    logits = jax.jit(lambda t: model(t, **given))(tokens[:, :-1])[0, 1:]
    end = ids.index(2) + 1 if 2 in ids else len(ids)
    assert logits.argmax(-1).tolist()[:end] == ids[:end]
    read = task.read_weights(params)(source, tokens)
    assert read.shape == (1, tokens.shape[1] - 1, 2, 2)
    assert (read[0, 0] == 0).all() and (read[0, 1:].sum((-1, -2)) > 0).all()


def test_pictures_are_augmented_each_by_itself(task):
    config = emoji_flamingo.get_config("tiny")
    config.data.flip = True
    images = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 8, 8, 3)), jnp.float32)
    found = augmented_as(config.data, images, jax.random.key(0))
    same, turned = ((found == x).all((2, 3, 4)) for x in (images, images[:, :, :, ::-1]))
    assert (same ^ turned).all() and 0 < same.sum() < 12


def test_pictures_are_captioned_by_a_model_whose_words_read_patches(launched, tmp_path):
    config = emoji_llava.get_config("tiny")
    config.train.steps, config.model.layers = 1, 1
    train.run(config, tmp_path / "run")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    plot, run = tmp_path / "read.png", f"--workdir={tmp_path}/run"
    code, out, err = launched("caption", run, str(tmp_path / "a.png"), f"--plot={plot}")
    assert code == 0, err
    assert out.startswith(f"{tmp_path}/a.png: ")
    assert plot.stat().st_size > 1000


def test_pictures_that_are_smaller_than_a_patch_are_refused_before_anything_is_computed():
    config = emoji_llava.get_config("tiny")
    config.data.height = 2
    with pytest.raises(SettingsError, match="config.model: a picture of 8 x 2 pixels has no patch"):
        check(config)
