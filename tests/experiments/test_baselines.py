"""Baselines solve what they can see, and nothing else."""

import numpy as np
import pytest

from experiments import baselines
from experiments.baselines import Examples, predictions

RANDOM = np.random.default_rng(0)


def drawn(count):
    """The class is a sign of a product, which no linear rule sees, or the ending of a word."""
    numbers = RANDOM.normal(size=(count, 4)).astype(np.float32)
    labels = (numbers[:, 0] * numbers[:, 1] > 0).astype(np.int64)
    stems = RANDOM.choice(["sing", "walk", "jump", "read"], count)
    words = np.array(
        [f"{s}{'ing' if y else 'ed'}" for s, y in zip(stems, labels, strict=True)], object
    )
    noise = RANDOM.normal(size=(count, 65)).astype(np.float32)
    return Examples({"boxes": numbers, "words": words, "picture": noise}, labels)


@pytest.mark.slow
def test_each_kind_solves_what_it_can_see():
    train, validation, other = drawn(600), drawn(150), drawn(300)
    found = predictions(train, validation, other)
    right = {name: (said == other.labels).mean() for name, said in found.items()}
    assert right["boosted_trees_boxes"] > 0.95 and right["mlp_boxes"] > 0.9
    assert right["logistic_boxes"] < 0.65, "a product is not linear"
    assert right["character_ngrams_words"] == 1.0
    assert all(right[f"{kind}_picture"] < 0.62 for kind in ("nearest", "logistic", "mlp"))
    assert "boosted_trees_picture" not in found
    assert len(set(found["most_frequent_class"])) == 1


def test_settings_are_chosen_on_validation():
    """One mislabelled neighbour in each cluster: five neighbours are better than one on validation."""
    centres = np.repeat([[0.0, 0.0], [10.0, 10.0]], 50, axis=0)
    labels = np.repeat([0, 1], 50)
    points = centres + RANDOM.normal(size=(100, 2))
    flipped = labels.copy()
    flipped[::4] = 1 - flipped[::4]
    train = Examples({"boxes": points}, flipped)
    clean = Examples({"boxes": points + 0.01}, labels)
    assert (predictions(train, clean, clean)["nearest_boxes"] == labels).mean() > 0.8
    assert (predictions(train, train, train)["nearest_boxes"] == flipped).all()


def test_numbers_that_are_centred_have_a_classifier_of_their_own():
    """Scaled, noise of a hundredth counts as much as the number that tells the class."""

    def drawn(count):
        labels = RANDOM.integers(0, 2, count)
        noise = 0.01 * RANDOM.normal(size=(count, 80))
        return Examples({"picture": np.concatenate([labels[:, None], noise], 1)}, labels)

    other = drawn(200)
    found = predictions(drawn(60), drawn(60), other)
    assert (found["nearest_picture"] == other.labels).all()


def test_trees_read_the_main_axes_of_wide_views():
    """The class is the sign of a product of a number of the boxes and of what all pixels share."""
    random = np.random.default_rng(0)
    pattern = random.normal(size=80)

    def drawn(count):
        boxes, light = random.normal(size=(count, 2)), random.normal(size=count)
        pixels = light[:, None] * pattern + 0.1 * random.normal(size=(count, 80))
        words = np.array(["a"] * count, object)
        views = {"boxes": boxes, "picture": pixels, "words": words}
        return views, (boxes[:, 0] * light > 0).astype(np.int64)

    given = {name: drawn(1200) for name in ("train", "validation", "test")}
    found = baselines.scores(given.__getitem__, "test", {"accuracy": baselines.accuracy})
    assert found["boosted_trees_boxes_and_picture_accuracy"] > 0.9
    assert found["boosted_trees_boxes_accuracy"] < 0.62
    alone = {name: ({"picture": views["picture"]}, y) for name, (views, y) in given.items()}
    scored = baselines.scores(alone.__getitem__, "test", {"accuracy": baselines.accuracy})
    trees = {name: value for name, value in scored.items() if "boosted" in name}
    # The light alone says nothing, by itself or beside the boxes.
    assert list(trees) == ["boosted_trees_picture_accuracy"] and trees.popitem()[1] < 0.62
    bright = {name: (views, views["picture"] @ pattern > 0) for name, (views, _) in given.items()}
    bright = {
        name: ({"picture": v["picture"]}, y.astype(np.int64)) for name, (v, y) in bright.items()
    }
    scored = baselines.scores(bright.__getitem__, "test", {"accuracy": baselines.accuracy})
    assert scored["boosted_trees_picture_accuracy"] > 0.95


def test_an_mlp_of_changed_examples_knows_what_training_pictures_lack(monkeypatch):
    """A class is how wide a bar is; training has it at one place, and what changes it everywhere."""
    few = {"mlp": baselines._centred_and_scaled(baselines._mlp(32))}
    monkeypatch.setattr(baselines, "_of_numbers", lambda size: few)

    def bars(places):
        labels = np.arange(len(places)) % 2
        at = (np.arange(12) - places[:, None]) % 12
        noise = 0.1 * RANDOM.normal(size=at.shape)
        return Examples(
            {"picture": ((at < 2 + labels[:, None]) + noise).astype(np.float32)}, labels
        )

    def moved(views, epoch):
        asked.append(epoch)
        steps = np.random.default_rng(epoch).integers(0, 12, len(views["picture"]))
        return {"picture": np.stack([*map(np.roll, views["picture"], steps)])}

    asked, train = [], bars(np.zeros(1000, int))
    validation, other = (bars(RANDOM.integers(0, 12, 300)) for _ in range(2))
    found = predictions(train, validation, other, moved)
    right = {name: (said == other.labels).mean() for name, said in found.items()}
    assert right["mlp_augmented_picture"] > 0.95 and right["mlp_picture"] < 0.8
    assert asked == list(range(baselines.EPOCHS))


def test_the_best_epoch_on_validation_counts(monkeypatch):
    monkeypatch.setattr(baselines, "_of_numbers", lambda size: {})
    labels = np.arange(1000) % 2
    points = Examples({"picture": labels[:, None] + 0.1 * RANDOM.normal(size=(1000, 8))}, labels)

    def changed(views, epoch):  # the second half teaches the opposite
        return {"picture": abs((epoch >= baselines.EPOCHS // 2) - views["picture"])}

    found = predictions(points, points, points, changed)
    assert (found["mlp_augmented_picture"] == labels).mean() > 0.9
