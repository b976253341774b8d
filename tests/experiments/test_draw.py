"""Text to image: what the loss is of, how pictures are scored, and the launcher."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import draw as config_file
from configs import emoji_captions as captions_file
from crossattn.data import scenes
from experiments import train
from experiments.bench import captions, drawn
from experiments.errors import SettingsError
from experiments.intervals import ratio
from experiments.runs import parameters, task_of
from experiments.settings import check
from experiments.tasks import make_task, text_to_image
from tests.closeness import close


def get_config(arg="tiny"):
    """The tiny config in the size of scenes, which can be read back."""
    config = config_file.get_config(arg)
    config.data.update(height=16, width=16)
    config.model.patch_size = 4
    return config


@pytest.fixture(scope="module")
def workdir(trained):
    return trained(get_config(), 2)


@pytest.fixture(scope="module")
def task():
    return make_task(get_config())


@pytest.fixture(scope="module")
def params(task):
    """Random ones, of which every part counts."""
    fresh = task.init(jax.random.key(0))
    leaves, tree = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [x + 0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, drawn)


def batch_of(task):
    return jax.tree.map(jnp.asarray, dict(next(iter(task.eval_batches("test", None)))))


@pytest.mark.slow
@pytest.mark.parametrize("process", ["flow", "data_flow", "ddpm"])
def test_the_loss_is_the_squared_error_of_the_velocity_or_the_noise(params, process):
    config = get_config("ddpm,tiny" if process == "ddpm" else "tiny")
    config.loss.process = process
    task, given = make_task(config), {}
    batch = batch_of(task)
    batch["valid"] = batch["valid"].at[-1].set(0)

    class Model:
        def __call__(self, image, time, tokens, segment_ids, *, key):
            given.update(x=image, time=time, segments=segment_ids, key=key)
            return jnp.zeros_like(image)

    task.bind = lambda _: Model()
    loss, sums = task.loss(params, batch, None)
    x, time = (np.asarray(given[name], np.float64) for name in ("x", "time"))
    t = time[:, None, None, None]
    if process != "ddpm":
        noise = (x - (1 - t) * batch["image"]) / t
        told = (
            batch["image"] / np.maximum(t, 0.3)
            if process == "data_flow"
            else noise - batch["image"]
        )
    else:
        kept = np.cumprod(np.append(1, 1 - np.linspace(1e-4, 0.02, 1000)))
        kept = kept[np.rint(1000 * t).astype(int)]
        told = noise = (x - np.sqrt(kept) * batch["image"]) / np.sqrt(1 - kept)
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    assert 0 <= time.min() < 0.2 and 0.8 < time.max() <= 1
    expected = np.square(told).mean((1, 2, 3))[:-1].sum()
    assert float(loss) == pytest.approx(expected, rel=1e-3) and sums["weight"] == len(x) - 1
    assert given["key"] is None and (given["segments"] == batch["caption_segment_ids"]).all()
    again = given["x"]
    task.loss(params, batch, None)
    np.testing.assert_array_equal(again, given["x"])  # the same noise in each evaluation
    task.loss(params, batch, jax.random.key(5))
    assert np.abs(again - given["x"]).max() > 0.1 and given["key"] is not None


@pytest.mark.slow
def test_a_share_of_the_captions_is_not_read_in_training_alone(task, params):
    given = {}

    class Model:
        def __call__(self, image, time, tokens, segment_ids, *, key):
            given["segments"] = segment_ids
            return image

    own = make_task(get_config())
    own.bind = lambda _: Model()
    batch = batch_of(own)
    unread = 0
    for seed in range(40):
        own.loss(params, batch, jax.random.key(seed))
        none = ~np.asarray(given["segments"]).any(-1)
        read = given["segments"][~none]
        np.testing.assert_array_equal(read, batch["caption_segment_ids"][~none])
        unread += none.mean() / 40
    assert unread == pytest.approx(0.1, abs=0.03)
    own.loss(params, batch, None)
    assert np.asarray(given["segments"]).any(-1).all()


@pytest.mark.slow
def test_guidance_0_draws_the_same_whatever_the_text_and_1_what_the_caption_says(task, params):
    texts = ["a red circle", "a small blue frame at the top left"]
    for guidance, same in ((0.0, True), (1.0, False), (3.0, False)):
        draw = task.drawer(params, guidance=guidance)
        one, other = (draw([text], 0) for text in texts)
        assert np.array_equal(one, other) == same
        assert np.abs(one - draw([texts[0]], 1)).max() > 0.1
    # By hand, one step of Euler: the picture that the conditional model says.
    found = task.drawer(params, guidance=1.0, sampler="euler", steps=1)(texts, 7)
    noise = jax.random.normal(jax.random.split(jax.random.key(7))[0], (2, 16, 16, 3))
    batch = jax.tree.map(jnp.asarray, task.captions(texts))
    given = batch["caption"], batch["caption_segment_ids"]
    close(found, task.bind(params)(noise, jnp.ones(2), *given), ulps=5000)


@pytest.mark.slow
def test_the_path_of_a_picture_and_what_each_step_read(task, params):
    x, path, times, weights = task.drawer(params, return_path=True)(["a red circle"], 0)
    np.testing.assert_array_equal(x, task.drawer(params)(["a red circle"], 0))
    assert path.shape == (4, 1, 16, 16, 3) and times.tolist() == [1, 0.75, 0.5, 0.25]
    assert weights.shape == (4, 2, 1, 2, 16, 20)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    count = int(task.captions(["a red circle"])["caption_segment_ids"].sum())
    assert not weights[..., count:].any()


@pytest.mark.slow
def test_texts_are_drawn_in_batches_each_with_its_own_noise(task, params, monkeypatch):
    task.config.evaluate.batch_size = 3
    texts = ["a red circle"] * 5
    found = task.draw(params, texts)
    assert found.shape == (5, 16, 16, 3) and found.dtype == np.uint8
    assert len({picture.tobytes() for picture in found}) == 5


@pytest.mark.slow
def test_a_right_share_is_that_of_pictures_that_show_their_captions(task, params, monkeypatch):
    examples = task.examples("validation", 8)
    pictures = np.stack([each["image"] for each in examples])
    monkeypatch.setattr(task, "draw", lambda params, texts, **_: pictures)
    assert task.right(params, "validation", 8).value == 1
    monkeypatch.setattr(task, "draw", lambda params, texts, **_: np.roll(pictures, 1, 0))
    swapped = [scenes.shows(pictures[i - 1], each["caption"]) for i, each in enumerate(examples)]
    assert task.right(params, "validation", 8).value == np.mean(swapped) < 0.5


def test_a_report_has_the_interval_of_the_right_share_over_captions(task, monkeypatch):
    examples = [dict(each) for each in task.examples("test", 8)]
    for row in range(0, 8, 2):
        examples[row + 1]["caption"] = examples[row]["caption"]
    captions = [each["caption"] for each in examples]
    pictures = np.stack([examples[row - row % 2 if row < 6 else 0]["image"] for row in range(8)])
    monkeypatch.setattr(task, "examples", lambda split, count=None: examples)
    monkeypatch.setattr(task, "draw", lambda params, texts, **_: pictures)
    monkeypatch.setattr(task, "split_loss", lambda *_: {})
    shown = np.array([scenes.shows(x, text) for x, text in zip(pictures, captions, strict=True)])
    found, expected = task.report({}, "test", limit=8), ratio(shown, np.ones(8), captions)
    alone = ratio(shown, np.ones(8))
    assert found["right_guidance_3"] == expected.value == shown.mean() == 0.75
    assert found["right_guidance_3_low"] == expected.low < alone.low
    assert found["right_guidance_3_high"] == expected.high


@pytest.mark.slow
def test_baselines_are_of_the_same_noise_and_better_than_nothing(task, params):
    found = task.baselines("validation")
    task.bind, before = lambda _: lambda x, *_, **__: jnp.zeros_like(x), task.bind
    nothing = task.split_loss({}, "validation")["mse"]
    task.bind = before
    assert found.keys() == {"linear_mse", "nearest_right"}
    assert 0 < found["linear_mse"] < 0.5 * nothing
    # Held-out captions name a colour of a shape that no training picture has; its own show theirs.
    assert found["nearest_right"] == 0 and task.baselines("train")["nearest_right"] > 0.8
    large = get_config()
    large.data.update(height=32, width=36)
    assert make_task(large).baselines("validation") == {}


def test_a_blind_task_reads_words_of_0_and_a_shuffled_one_others(task):
    batch = batch_of(task)
    config = get_config()
    config.data.blind = True
    seen = make_task(config).seen(batch)
    assert not seen["caption"].any() and seen["caption_segment_ids"].any()
    other = task.shuffled(batch)
    np.testing.assert_array_equal(
        other["caption"], np.roll(batch["caption"], len(batch["caption"]) // 2, 0)
    )
    assert other["image"] is batch["image"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"loss.process": "ddpm", "evaluate.sampler": "euler"},
            "'euler', which follows the velocity of a flow",
        ),
        ({"checkpoint.best_metric": "right"}, "evaluate.examples of 1 or more measures"),
        (
            {"checkpoint.best_metric": "right", "evaluate.examples": 2, "data.name": "shapes"},
            "measured on shapes/scenes of 16 by 16 pixels alone; take 'mse'",
        ),
        ({"data.height": 18}, "18 and 16; expected multiples of model.patch_size, 4"),
        ({"model.name": "vit"}, "has no"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, said):
    config = get_config()
    config.update_from_flattened_dict(change)
    with pytest.raises(SettingsError, match=said):
        check(config)


@pytest.mark.slow
def test_a_picture_and_its_growth_are_drawn(workdir, launched, tmp_path):
    out, plot = tmp_path / "x.png", tmp_path / "growth.png"
    command = ("draw", f"--workdir={workdir}", "a red circle", f"--out={out}")
    code, said, err = launched(*command, f"--plot={plot}")
    assert code == 0, err
    assert (
        said.startswith(f"{out}: a red circle, read back as ") or said == f"{out}: a red circle\n"
    )
    first = np.asarray(Image.open(out))
    assert first.shape == (256, 256, 3) and plot.stat().st_size > 5000
    np.testing.assert_array_equal(first, first[::16, ::16].repeat(16, 0).repeat(16, 1))
    launched(*command, "--seed=1", "--sampler=ddim", "--sampling_steps=2", "--guidance=1")
    assert not np.array_equal(first, np.asarray(Image.open(out)))
    words = json.loads((workdir / "assets" / "words.json").read_text())
    assert {"red", "circle", "above", "a"} <= set(words)


@pytest.mark.slow
def test_several_texts_are_numbered_and_a_wrong_one_stops_no_other(workdir, launched, tmp_path):
    texts = ("a red circle", "a giraffe", "A blue frame")
    files = (f"--out={tmp_path}/x.png", f"--gallery={tmp_path}/all.png")
    code, said, err = launched("draw", f"--workdir={workdir}", *texts, *files)
    assert code == 1 and err.count("\n") == 1 and "'giraffe'" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.png", "x-1.png", "x-3.png"]
    assert said.count("\n") == 2


@pytest.mark.slow
def test_each_text_is_drawn_with_each_guidance_from_the_same_noise(workdir, launched, tmp_path):
    scales = ("--guidance=0", "--guidance=2")
    out, page = f"--out={tmp_path}/x.png", f"--gallery={tmp_path}/all.png"
    command = ("draw", f"--workdir={workdir}", "--sampling_steps=2", out)
    code, said, err = launched(*command, "a red circle", "a blue frame", *scales, page)
    assert code == 0 and said.count("\n") == 4, err
    found = [np.asarray(Image.open(tmp_path / f"x-{i}.png")) for i in (1, 2, 3, 4)]
    np.testing.assert_array_equal(found[0], found[2])  # both ignore their text
    assert (tmp_path / "all.png").stat().st_size > 5000
    launched(*command, "a blue frame", "--guidance=2")
    np.testing.assert_array_equal(found[3], np.asarray(Image.open(tmp_path / "x.png")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "got no text; name some"),
        ([""], "the text is empty"),
        ([" \n"], "the text is empty"),
        (
            ["a plaid giraffe"],
            "'plaid', which no training caption has; expected of their words: a, above,",
        ),
        (["a red circle" * 1000], "which no training caption has"),
        (["a red circle " * 1000], "tokens; the run reads 20 at most"),
        (["a red circle", "--out="], "--out is missing"),
        (["a red circle", "--out=x.jpg"], "--out names x.jpg; expected a .png file"),
        (["a red circle", "--plot=x.gif"], "--plot names x.gif"),
        (["a red circle", "--guidance=-1"], "guidance"),
        (["a red circle", "--sampler=heun"], "sampler"),
        (["a red circle", "--sampling_steps=0"], "sampling_steps"),
    ],
)
def test_a_wrong_call_is_one_line(workdir, refused, tmp_path, arguments, said):
    err = refused("draw", f"--workdir={workdir}", f"--out={tmp_path}/x.png", *arguments)
    assert said in err and len(err) < 400
    assert not list(tmp_path.iterdir())


def test_a_run_of_another_task_is_refused(refused, tmp_path):
    other = get_config()
    (tmp_path / "run").mkdir()
    del other
    assert "there is no run" in refused(
        "draw", f"--workdir={tmp_path / 'run'}", "a red circle", f"--out={tmp_path}/x.png"
    )


def test_the_most_similar_caption_shares_its_letters_in_threes():
    known = ["a red circle", "a green square", "two blue squares"]
    assert drawn.most_similar(["the greenest square", "circles", "blue"], known) == [1, 0, 2]


@pytest.mark.slow
def test_a_captioner_ranks_what_is_drawn_of_captions_of_the_same_split(
    tmp_path, capsys, monkeypatch
):
    for name, config in (("drawn", get_config()), ("captions", captions_file.get_config("tiny"))):
        config.train.steps = 1
        if name == "drawn":
            config.data.update(name="shapes/en", text_len=24)
            del config.data["options"]
        train.run(config, tmp_path / name)
    options = ["drawn", *(str(tmp_path / name) for name in ("drawn", "captions")), "--limit=8"]
    ranked = []

    def ranks_of(task, params, examples):
        ranked.append(np.stack([example["source"] for example in examples]))
        return np.arange(1, 9) + 6

    monkeypatch.setattr(captions, "ranks_of", ranks_of)
    monkeypatch.setattr("sys.argv", [*options, "--guidance=0", "--guidance=1"])
    capsys.readouterr()
    drawn.main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "8 captions; among the first 10 by chance 1.000"
    assert [line.split("  ")[0] for line in lines] == [
        *("true pictures", "similar captions", "guidance 0", "guidance 1")
    ]
    assert all(re.search(r" 0.5 \(.*\) +median rank 10.5$", line) for line in lines), lines
    captioner = make_task(captions_file.get_config("tiny"))
    known = captions.by_language(captioner, "train")["en"]
    examples = captions.by_language(captioner, "test", 8)["en"]
    told, learnt = ([e["target"][1] for e in own] for own in (examples, known))
    task = task_of(tmp_path / "drawn")
    made = parameters(task, tmp_path / "drawn")
    expected = [
        [example["source"] for example in examples],
        [known[index]["source"] for index in drawn.most_similar(told, learnt)],
        *(task.draw(made, told, guidance=x) for x in (0.0, 1.0)),
    ]
    for found, own in zip(ranked, expected, strict=True):
        np.testing.assert_array_equal(found, own)
    # The captioner itself, which gives each picture a rank among the eight.
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", options)
    drawn.main()
    assert re.search(r"guidance 3 +1 \(1 to 1\) +median rank [1-8]", capsys.readouterr().out)
    for more, said in (
        (["--limit=0"], "no caption is left by --limit=0"),
        (["--language=fr"], "no language 'fr'; expected one of ['de', 'en']"),
        (["--language=de"], "(shapes/en), which may have trained on them"),
    ):
        monkeypatch.setattr("sys.argv", [*options, *more])
        with pytest.raises(SystemExit):
            drawn.main()
        assert said in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["drawn", options[2], options[1]])
    with pytest.raises(SystemExit):
        drawn.main()
    assert "is a captioning; expected a text_to_image" in capsys.readouterr().err


def test_values_beyond_black_and_white_are_cut():
    x = np.array([-3.0, -1, 0, 1, 3]).reshape(1, 5, 1, 1).repeat(3, -1)
    assert text_to_image.pixels(x)[0, :, 0, 0].tolist() == [0, 0, 128, 255, 255]
