"""Classes of pictures, texts or both: what a model is given, what is counted, what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import emoji_group, fashion_perceiver
from crossattn.data import features
from experiments.errors import SettingsError
from experiments.runs import parameters
from experiments.settings import check, saved_config
from experiments.tasks import classification, make_task
from experiments.tasks.augmentation import augmented_as

READ = ("image", "caption", "both", "voice", "all")


@pytest.mark.quick(1)
@pytest.mark.parametrize("read", READ)
def test_a_model_is_given_what_the_config_names_and_every_example_counts_once(read):
    config = emoji_group.get_config(f"{read},tiny")
    config.data.batch_size = 24  # 256 examples are no multiple
    config.loss.label_smoothing = 0.1
    check(config)
    task = make_task(config)
    params = task.init(jax.random.key(0))
    probabilities, classes = task.probabilities(params, "test")
    scores = task.split_loss(params, "test")
    examples = task.examples("test")
    assert [task.classes[c] for c in classes] == [example["shape"] for example in examples]
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-5)
    assert scores["accuracy"] == pytest.approx(np.mean(probabilities.argmax(-1) == classes))
    nll = -np.log(probabilities[np.arange(len(classes)), classes]).mean()
    assert scores["nll"] == pytest.approx(nll, rel=1e-4)
    even = -np.log(probabilities).mean()
    assert scores["loss"] == pytest.approx(0.9 * nll + 0.1 * even, rel=1e-4)


def test_an_example_that_cannot_be_read_has_no_weight(monkeypatch):
    task = make_task(emoji_group.get_config("image,tiny"))
    found = np.array([[0.25, 0.75], [0.0, 0.0], [0.5, 0.5]])  # of the second nothing is known
    monkeypatch.setattr(task, "probabilities", lambda *_: (found, np.array([1, 0, 1])))
    table = task.outcomes({}, "test")
    assert table["weight"] == [1.0, 0.0, 1.0] and table["accuracy"] == [1.0, 0.0, 0.0]
    np.testing.assert_allclose(table["nll"], -np.log([0.75, 1.0, 0.5]))


@pytest.mark.slow
def test_a_folder_of_pictures_by_class_is_learnt(tmp_path, launched):
    for shade, kind in ((40, "dark"), (200, "light")):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for i in range(40):
            pixels = np.full((9, 12, 3), shade + i, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / kind / f"{i}.jpg")
    (tmp_path / "photos" / "dark" / "7.jpg").write_bytes(b"broken")
    named = f"--config.data.name=pictures:{tmp_path}/photos"
    given = (
        "--config.data.label=label",
        "--config.data.unreadable=skip",
        "--config.train.steps=12",
    )
    config = "--config=configs/fashion_vit.py:tiny"
    code, out, err = launched("train", config, named, *given, f"--workdir={tmp_path}/run")
    assert code == 0 and "7.jpg is no image of a kind that is read" in err, err
    assert "accuracy 1" in out


@pytest.mark.slow
def test_the_accuracy_of_a_run_is_that_of_its_probabilities(launched, tmp_path):
    for read in ("image", "caption"):
        workdir, config = tmp_path / read, f"--config=configs/emoji_group.py:{read},tiny"
        code, _, err = launched("train", config, f"--workdir={workdir}", "--config.train.steps=2")
        assert code == 0, err
        assert (workdir / "assets" / "tokenizer.json").exists() == (read == "caption")
        code, _, err = launched("evaluate", f"--workdir={workdir}", "--split=test")
        results = json.loads((workdir / "results-test.json").read_text())
        task = make_task(saved_config(workdir), workdir / "assets")
        probabilities, classes = task.probabilities(parameters(task, workdir), "test")
        assert code == 0
        assert results["accuracy"] == pytest.approx(np.mean(probabilities.argmax(-1) == classes))


@pytest.mark.slow
def test_baselines_are_fitted_to_what_the_config_reads():
    found = make_task(emoji_group.get_config("caption,tiny")).baselines("test")
    accuracy = {name.removesuffix("_accuracy"): value for name, value in found.items()}
    # Two captions of three name the shape; of the others no more than the frequent class is known.
    assert accuracy.pop("most_frequent_class") < 0.5
    kinds = ("nearest_text", "logistic_text", "mlp_text", "boosted_trees_text")
    assert set(accuracy) == {*kinds, "character_ngrams_words"}
    assert all(0.5 < value < 0.95 for value in accuracy.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(image=None), "data.image, data.text and data.sound are all none"),
        (dict(height=10**8), "data.height is 100000000; expected .* at most 8192"),
        (dict(text="caption"), "lacks data.text_len"),
        (dict(text="caption", text_len=8), "lacks the section tokenizer"),
        (dict(sound="sound"), "lacks data.frames"),
        (dict(sound="image", frames=9), "reads image, image and the label shape; expected other"),
        (dict(image="shape"), "reads shape and the label shape; expected other"),
        (dict(frames=9), "data.frames is 9, but data.sound is none"),
        (dict(label="colour"), "is 'colour'; expected one of the labels of shapes: shape"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change, said):
    config = fashion_perceiver.get_config("tiny")
    with config.unlocked():
        config.data.update(change)
    with pytest.raises(SettingsError, match=said):
        check(config)


def test_permuted_pixels_reach_model_and_baselines_alike():
    config, rows = fashion_perceiver.get_config("tiny"), []
    for config.data.permuted in (False, True):
        check(config)
        rows.append(make_task(config).vectors("test")[0]["picture"])
    plain, permuted = rows
    assert not np.array_equal(plain, permuted)
    np.testing.assert_array_equal(np.sort(plain, 1), np.sort(permuted, 1))
    # One order: pixels of the same column are the same numbers over all pictures.
    assert sorted(map(bytes, plain.T.copy())) == sorted(map(bytes, permuted.T.copy()))


@pytest.mark.parametrize("permuted", [False, True])
def test_a_baseline_is_fitted_to_pictures_that_are_changed_as_in_training(permuted, monkeypatch):
    config = fashion_perceiver.get_config("tiny")
    config.data.update(shift=1, flip=True, permuted=permuted)
    check(config)
    task = make_task(config)
    views, _ = task.vectors("train")
    first, again, other = (task.changed(views, epoch)["picture"] for epoch in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert first.shape == views["picture"].shape and (first != other).any(1).mean() > 0.5
    rows, size = config.data.batch_size, task.features["image"].shape
    given = {"image": views["picture"][rows : 2 * rows].reshape(rows, *size)}
    batch = given | {"shape": np.zeros(rows, int), "valid": np.ones(rows)}
    seen = []
    monkeypatch.setattr(
        task, "logits", lambda _, read, *__: seen.append(read) or np.zeros((rows, 3))
    )
    task.loss({}, batch, jax.random.fold_in(jax.random.key(0), rows))
    np.testing.assert_array_equal(first[rows : 2 * rows], seen[0]["image"].reshape(rows, -1))


@pytest.mark.parametrize(("flip", "shift"), [(True, 0), (False, 1), (False, 0)])
def test_a_baseline_of_changed_pictures_is_there_where_training_changes_them(
    flip, shift, monkeypatch
):
    config = fashion_perceiver.get_config("tiny")
    config.data.update(flip=flip, shift=shift)
    task = make_task(config)
    monkeypatch.setattr(classification, "scores", lambda *given: given[-1])
    assert task.baselines("test") == (task.changed if flip or shift else None)


def test_permuted_pixels_are_augmented_on_their_grid():
    data, key = dict(flip=True, shift=2), jax.random.key(0)
    images = np.random.default_rng(0).random((6, 5, 4, 1), np.float32)
    order = features.Image(5, 4, permuted=True).order
    permuted = images.reshape(6, 20)[:, order].reshape(images.shape)
    expected = np.asarray(augmented_as(data, jnp.asarray(images), key))
    assert not np.array_equal(expected, images)
    found = augmented_as(data, jnp.asarray(permuted), key, order)
    np.testing.assert_array_equal(
        np.asarray(found).reshape(6, 20), expected.reshape(6, 20)[:, order]
    )


@pytest.mark.parametrize(
    ("read", "model", "lacks"),
    [
        ("image", "decoder", r"Decoder has no hidden\(\*, image, key\): it lacks image"),
        ("voice", "vit", r"ViT has no hidden\(\*, sound, key\): it lacks sound"),
        ("all", "bert", r"Bert has no hidden\(\*, image, key\): it lacks image"),
    ],
)
def test_a_model_of_other_inputs_is_refused(read, model, lacks):
    config = emoji_group.get_config(f"{read},tiny")
    config.model = dict(name=model)
    with pytest.raises(SettingsError, match=lacks):
        make_task(config).check(config)


def test_beside_a_text_pictures_and_sounds_are_the_memory():
    task = make_task(emoji_group.get_config("all,tiny"))
    batch = next(iter(task.numbered_batches("test", None))).batch
    other = task.shuffled(batch)
    for name in ("image", "sound"):
        assert batch[name].any() and not np.array_equal(other[name], batch[name])
    np.testing.assert_array_equal(other["caption"], batch["caption"])
    task.config.data.blind = True
    blank = task.seen(batch)
    assert not any(np.any(blank[name]) for name in ("image", "sound")) and np.any(blank["caption"])
    assert make_task(emoji_group.get_config("voice,tiny")).memory == ()
    config = emoji_group.get_config("all,tiny")
    config.data.text = None
    task = make_task(config)
    assert task.memory == ("sound",)
    other = task.shuffled(batch)
    np.testing.assert_array_equal(other["image"], batch["image"])
    assert not np.array_equal(other["sound"], batch["sound"])


def test_baselines_hear_what_the_config_hears():
    views, classes = make_task(emoji_group.get_config("all,tiny")).vectors("test")
    assert [*views] == ["picture", "text", "words", "sound"]
    assert views["sound"].shape == (256, 32 * 40) and len(classes) == 256
    # Tones of half of the shapes; of the others one sound.
    assert len(np.unique(views["sound"], axis=0)) == 5
