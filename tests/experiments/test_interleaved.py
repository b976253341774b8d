"""Captions after pictures: how rows are made, a language model that learns to see, and what it writes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import emoji_captions, emoji_flamingo, emoji_llava
from crossattn.data.errors import DataError
from crossattn.data.features.interleaved import IMAGE, interleaved
from crossattn.data.sources import open_source
from crossattn.functional import flatten
from experiments import train
from experiments.errors import SettingsError
from experiments.runs import parameters as parameters_of
from experiments.settings import check, saved_config
from experiments.tasks import make_task
from experiments.tasks.augmentation import augmented_as
from experiments.tasks.interleaved import InterleavedTask
from experiments.tasks.ngrams import surprises
from experiments.tasks.shots import Rows
from tests.experiments.conftest import ROOT
from tests.experiments.test_captioning import table
from tests.experiments.test_explore import views_of
from tests.viz.test_explore import weights_of

CONFIG = f"--config={ROOT}/configs/emoji_flamingo.py"
CAPTIONS, LLAVA = (f"--config={ROOT}/configs/emoji_{name}.py" for name in ("captions", "llava"))
SHORT = [f"--config.{key}=2" for key in ("train.steps", "checkpoint.every", "train.eval_every")]


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
    captions = np.array([[[5, 6, 2, 0], [7, 2, 0, 0]], [[8, 9, 9, 2], [0, 0, 0, 0]]])
    rows = interleaved(captions)
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
    assert rows["target_segment_ids"].sum(-1).tolist() == [8, 6]
    rows, three = interleaved(captions[:1], 3), [IMAGE] * 3
    assert rows["target_in"].tolist() == [[1, *three, 5, 6, 2, *three, 7, 2, 0, 0]]
    assert rows["shots"].tolist() == [[*[-1] * 3, *[0] * 3, *[-1] * 3, 1, 1, *[-1] * 3]]
    assert rows["image_positions"].tolist() == [[1, 7]]


def test_a_row_has_one_language_and_a_family_only_once():
    languages, families = "en de fr".split(), "cat dog cow owl ant".split()
    known = [
        {"image": f"{family} {tone}", "caption": f"{language} {family}", "language": language,
         "family": family}
        for language in languages for family in families for tone in range(3)
    ]  # fmt: skip
    rows = Rows(known, "language")
    found = rows.ending(4, seed=1)
    assert len(found) == len(known)
    for number, row in enumerate(found):
        assert row["images"][-1] == known[number]["image"]
        words = [caption.split() for caption in row["target"]]
        assert {language for language, _ in words} == {known[number]["language"]}
        own = [family for _, family in words]
        assert len(own) == len(set(own)) == len(row["images"]) and len(own) > 1
    assert [rows.before(7, 2).tolist()] == [rows.before(7, 4).tolist()[:2]]
    assert list(found) == list(rows.ending(4, seed=1)) != list(rows.ending(4, seed=2))
    once = [
        (image, caption)
        for row in rows.once(4)
        for image, caption in zip(row["images"], row["target"], strict=True)
    ]
    assert sorted(once) == sorted((x["image"], x["caption"]) for x in known)
    assert all(len({text[:2] for text in row["target"]}) == 1 for row in rows.once(4))


@pytest.mark.slow
def test_rows_of_a_run_share_a_language():
    config = emoji_flamingo.get_config("tiny")
    config.data.name, config.data.together = "shapes/en,de", "language"
    task = InterleavedTask(config)
    german = ("ein", "etwas")
    for batch in (next(task.train_iterator(0, 1)), next(iter(task.eval_batches("test", None)))):
        for tokens in batch["target_in"][batch["valid"] > 0]:
            text = task.corpus.tokenizer.decode(tokens[tokens != IMAGE].tolist()).split()
            assert (
                len({word in german for word in text if word in (*german, "a", "something")}) == 1
            )
    found, expected = task.baselines("test"), []
    for language in ("de", "en"):
        known, new = (
            [
                np.array(task.features["target"].prepare(example["caption"]))
                for example in open_source("shapes/en,de", split)
                if example["language"] == language
            ]
            for split in ("train", "test")
        )
        expected += surprises(known, new, 3, task.corpus.tokenizer.vocab_size)[-1].tolist()
    assert found["trigrams_told_nll"] == pytest.approx(np.mean(expected))
    assert found["trigrams_told_nll"] < found["trigrams_nll"] - 0.05
    config.data.together = "tongue"
    with pytest.raises(DataError, match="this task reads 'tongue'"):
        InterleavedTask(config).refuse_unready()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Runs of a language model and of a captioner, that others begin with."""
    folder = tmp_path_factory.mktemp("begun")
    for name, config in (
        ("text", emoji_flamingo.get_config("text,tiny")),
        ("captions", emoji_captions.get_config("patches,tiny")),
    ):
        config.train.steps = config.checkpoint.every = config.train.eval_every = 2
        train.run(config, folder / name)
    return f"{folder}/text", f"{folder}/captions"


@pytest.mark.slow
def test_gates_and_resampler_alone_learn_on_a_language_model_and_an_encoder_that_stay_as_they_are(
    launched, parameters, refused, begun, tmp_path
):
    text, captions = (flatten(parameters(Path(run))) for run in begun)
    begin, workdir = f"--config.init.from={','.join(begun)}", tmp_path / "run"
    gated = (f"{CONFIG}:gated,tiny", *SHORT, begin, f"--workdir={workdir}")
    said = refused("train", *gated, f"--config.init.from={begun[0]},{begun[0]}")
    assert "of which two have decoder." in said and not workdir.exists()
    code, _, err = launched("train", *gated)
    assert code == 0, err
    after = flatten(parameters(workdir))
    for name, x in text.items():
        np.testing.assert_array_equal(x, after[name], name)
    seeing = {name: x for name, x in captions.items() if name.startswith("encoder.")}
    for name, x in seeing.items():
        np.testing.assert_array_equal(x, after[name.replace("encoder", "vision", 1)], name)
    assert len(seeing) == sum(name.startswith("vision.") for name in after)
    gates = [x for name, x in after.items() if name.endswith("gate")]
    assert len(gates) == 2 and all(gates)
    said = refused("caption", f"--workdir={begun[0]}", str(tmp_path / "a.png"))
    assert "config.model.name is 'decoder', which reads no pictures" in said
    *_, last = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert last["nll"] != last["nll_shuffled"]


@pytest.mark.slow
def test_a_projector_learns_alone_and_then_with_its_language_model(
    launched, parameters, begun, tmp_path
):
    known, stages = flatten(parameters(Path(begun[0]))), {}
    source = ",".join(begun)
    for stage in ("projector", "tuned"):
        arguments = (f"{LLAVA}:{stage},tiny", *SHORT, f"--config.init.from={source}")
        code, _, err = launched("train", *arguments, f"--workdir={tmp_path}/{stage}")
        assert code == 0, err
        stages[stage], source = flatten(parameters(tmp_path / stage)), f"{tmp_path}/projector"
    one, two = stages["projector"], stages["tuned"]
    for name, x in known.items():
        np.testing.assert_array_equal(x, one[name], name)
    changed = {name.partition(".")[0] for name in one if not np.array_equal(one[name], two[name])}
    assert changed == {"projector", "decoder", "input"}


@pytest.mark.slow
@pytest.mark.parametrize("config", [emoji_flamingo, emoji_llava])
def test_captions_are_told_without_an_example_and_with_some(config):
    task = InterleavedTask(config.get_config("tiny"))
    told = task.samples(jax.jit(task.init)(jax.random.key(0)), "validation")
    assert len(told) == 4 and all(line.count(" | ") == 2 for line in told)
    captions = {example["caption"] for example in open_source("shapes", "validation")}
    assert {line.rpartition(" | ")[2] for line in told} <= captions


@pytest.mark.slow
def test_losses_after_examples_are_of_every_caption_and_those_before_it(task, params):
    report = task.report(params, "validation", limit=5)
    examples = open_source("shapes", "validation")
    order = np.random.default_rng(0).permutation(len(examples)).tolist()
    prepared = [task.features["source"].prepare(x["image"]) for x in examples]
    ids = [task.features["target"].prepare(x["caption"]).tolist() for x in examples]
    rows = task.rows("validation")
    width = 1 + 3 * task.config.data.text_len + 3
    logits = jax.jit(
        lambda p, tokens, images, places: task.bind(p)(
            tokens, images=images, image_positions=places
        )
    )

    def nll(count, last, shown):
        """Of one caption after others, told by a row of its own."""
        tokens, places, images = [1], [], []
        for i in [*rows.before(last, count), last]:
            places.append(len(tokens))
            images.append(prepared[shown if i == last else i])
            tokens += [IMAGE, *ids[i]]
        end = len(tokens)
        assert len(places) == count + 1 == len(set(places))
        images += [images[0]] * (3 - len(images))
        places += [-1] * (3 - len(places))
        row = jnp.asarray([tokens + [0] * (width - end)])
        found = np.asarray(logits(params, row, np.stack(images)[None], np.array([places])), float)[
            0
        ]
        own = range(end - len(ids[last]), end)
        return sum(np.log(np.exp(found[t - 1]).sum()) - found[t - 1, tokens[t]] for t in own)

    chosen, table = order[:5], report["examples"]
    assert table["weight"] == [len(ids[last]) for last in chosen]
    for count in (0, 2):
        for name, shown in (("", chosen), ("_shuffled", [*chosen[1:], chosen[0]])):
            expected = [nll(count, *each) for each in zip(chosen, shown, strict=True)]
            assert table[f"nll_{count}_shot{name}"] == pytest.approx(expected, rel=1e-4)
            mean = sum(expected) / sum(table["weight"])
            assert report[f"nll_{count}_shot{name}"] == pytest.approx(mean, rel=1e-4)
    assert report["gain_2_shot"] == pytest.approx(report["nll_0_shot"] - report["nll_2_shot"])
    assert report["nll_2_shot"] != report["nll_2_shot_shuffled"]
    assert "nll_4_shot" not in report and 0 <= report["chrf_2_shot"] <= 100
    assert "nll" in report
    watched = task.evaluate(params, 0)
    assert watched["nll"] != watched["nll_shuffled"] and np.isfinite(watched["nll_shuffled"])


@pytest.mark.slow
def test_a_caption_is_the_likeliest_after_its_prompt(task, params):
    examples = open_source("shapes", "validation")
    order = np.random.default_rng(0).permutation(len(examples)).tolist()
    assert [*task.texts(params, "validation", 2, 3)] == order[:3]
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


@pytest.mark.slow
def test_captions_whose_pictures_cannot_be_read_are_counted_and_not_scored(tmp_path):
    table(tmp_path, [{"caption": f"{'light' if i % 2 else 'dark'} {i}"} for i in range(240)])
    config = emoji_flamingo.get_config("tiny")
    config.data.update(name=f"pictures:{tmp_path}/table.tsv", together=None, unreadable="skip")
    task = InterleavedTask(config)
    params, examples = jax.jit(task.init)(jax.random.key(0)), task.examples("test")
    whole, written = task.report(params, "test"), task.texts(params, "test", 2)
    assert "unreadable" not in whole and [*written] == task.order("test", None).tolist()
    broken = [*written][-1]
    Path(tmp_path / examples[broken]["image"]).write_bytes(b"broken")
    found, left = task.report(params, "test"), task.texts(params, "test", 2)
    rows, order = task.rows("test"), task.order("test", None).tolist()
    read = [
        place
        for place, last in enumerate(order)
        # The row of a caption has its own picture, those of its examples, and another in its place.
        if broken not in [last, *rows.before(last, 2), order[(place + 1) % len(order)]]
    ]
    assert [*left] == [order[place] for place in read] and 1 < len(read) < len(order)
    assert left == {number: written[number] for number in left}
    assert found["unreadable"] == len(order) - len(read)
    for name, values in found["examples"].items():
        assert values == pytest.approx([whole["examples"][name][place] for place in read]), name
    losses = zip(found["examples"]["nll_0_shot"], found["examples"]["weight"], strict=True)
    mean = sum(loss for loss, _ in losses) / sum(found["examples"]["weight"])
    assert found["nll_0_shot"] == pytest.approx(mean)


def test_pictures_are_augmented_each_by_itself(task):
    config = emoji_flamingo.get_config("tiny")
    config.data.flip = True
    images = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 8, 8, 3)), jnp.float32)
    found = augmented_as(config.data, images, jax.random.key(0))
    same, turned = ((found == x).all((2, 3, 4)) for x in (images, images[:, :, :, ::-1]))
    assert (same ^ turned).all() and 0 < same.sum() < 12


@pytest.mark.slow
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

    page = tmp_path / "page.html"
    code, _, err = launched("explore", run, str(tmp_path / "a.png"), f"--out={page}")
    assert code == 0, err
    (view,) = views_of(page)
    task = make_task(saved_config(tmp_path / "run"), tmp_path / "run" / "assets")
    params, prompt = parameters_of(task, tmp_path / "run"), task.prompt_in(None)
    x = task.features["source"].prepare(str(tmp_path / "a.png"))[None]
    ids = task.writer(params)(x, np.array([prompt], np.int32))[0]
    read = task.read_weights(params)(x, np.array([[*prompt, *ids]], np.int32))[0]
    kept = read[len(prompt) - 1 :][ids != 0]
    assert (view["kind"], view["shape"][:3]) == ("picture", [1, 1, len(kept)])
    found = weights_of(view)[0, 0].reshape(kept.shape)
    np.testing.assert_allclose(found, kept, atol=1 / 400)


def test_pictures_that_are_smaller_than_a_patch_are_refused_before_anything_is_computed():
    config = emoji_llava.get_config("tiny")
    config.data.height = 2
    with pytest.raises(SettingsError, match="config.model: a picture of 8 x 2 pixels has no patch"):
        check(config)
