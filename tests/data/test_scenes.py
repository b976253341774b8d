"""Scenes of shapes: what is drawn is read back, and only what a caption says is right."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest

from crossattn.data import scenes, sources
from crossattn.data.errors import DataError
from crossattn.data.scenes import COLOURS, SHAPES, SIDE, SIZES, Thing
from crossattn.data.sources.shapes import held_out

RED = Thing("circle", "red", "small", (4, 4))
BLUE = Thing("frame", "blue", "large", (8, 11))


def test_each_shape_of_each_colour_and_size_is_read_back_wherever_it_stands():
    for shape, colour, size in itertools.product(SHAPES, COLOURS, SIZES):
        radius = SIZES[size]
        for middle in ((radius, radius), (8, 7), (SIDE - 1 - radius, radius)):
            thing = Thing(shape, colour, size, middle)
            assert scenes.read(scenes.draw([thing])) == [thing]


def test_noise_that_keeps_a_pixels_nearest_colour_changes_nothing_and_more_is_no_scene():
    picture = scenes.draw([RED, BLUE]).astype(int)
    rng = np.random.default_rng(0)
    near = np.clip(picture + rng.integers(-25, 26, picture.shape), 0, 255).astype(np.uint8)
    assert Counter(scenes.read(near)) == Counter([RED, BLUE])
    text = "a small red circle left of a large blue frame"
    assert scenes.shows(near, text)
    noise = rng.integers(0, 256, picture.shape).astype(np.uint8)
    assert not scenes.shows(noise, text) and not scenes.shows(np.full_like(noise, 255), text)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("a red circle left of a blue frame", True),
        ("a small red circle left of a blue frame", True),
        ("a small red circle left of a large blue frame", True),
        ("a large red circle left of a blue frame", False),
        ("a blue frame left of a red circle", False),
        ("a red circle above a blue frame", False),  # they stand too much side by side
        ("a red frame left of a blue circle", False),
        ("a blue circle left of a red frame", False),
        ("a red circle", False),  # and what is the other?
        ("a blue frame at the bottom right", False),
    ],
)
def test_a_picture_is_right_if_it_has_all_that_is_said_and_nothing_else(text, right):
    assert scenes.shows(scenes.draw([RED, BLUE]), text) == right


def test_one_thing_stands_in_the_corner_that_is_said_or_anywhere():
    picture = scenes.draw([BLUE])
    for corner in ("top left", "top right", "bottom left", "bottom right"):
        assert scenes.shows(picture, f"a blue frame at the {corner}") == (corner == "bottom right")
    assert scenes.shows(picture, "a blue frame") and not scenes.shows(picture, "a blue square")


def test_a_broken_shape_or_a_speck_beside_it_is_not_the_shape():
    picture = scenes.draw([BLUE])
    hole = scenes.draw([BLUE])
    hole[8:12, 8:15] = 255
    assert not scenes.shows(hole, "a blue frame")
    for side, right in ((1, True), (3, False)):  # one pixel is no thing, nine are
        picture[:side, :side] = COLOURS["red"]
        assert scenes.shows(picture, "a blue frame") == right


def test_captions_say_what_they_are_asked_to():
    assert scenes.caption([RED], [True], "top left") == "a small red circle at the top left"
    assert scenes.caption([RED], [False]) == "a red circle"
    both = scenes.caption([RED, BLUE], [False, True], "left of")
    assert both == "a red circle left of a large blue frame"
    for text in ("", "a circle", "a giant red circle", "a red circle left of", "a red ball"):
        with pytest.raises(DataError, match="no caption of a scene; expected one such as"):
            scenes.shows(scenes.draw([RED]), text)


def test_each_split_shows_what_its_captions_say_and_pairs_of_its_own():
    seen = {}
    for split in ("train", "validation", "test"):
        source = sources.open_source("shapes/scenes", split)
        examples = [source[i] for i in range(400)]
        assert all(scenes.shows(each["image"], each["caption"]) for each in examples)
        things = [scenes.read(each["image"]) for each in examples]
        seen[split] = [{(t.shape, t.colour) for t in own} for own in things]
        assert {len(own) for own in things} == {1, 2}
        others = (examples[i]["caption"] for i in range(1, 400))
        wrong = [scenes.shows(x["image"], text) for x, text in zip(examples, others, strict=False)]
        assert np.mean(wrong) < 0.1
    trained = set().union(*seen["train"])
    assert len(trained) == 20 and {held_out(*pair) for pair in trained} == {"train"}
    for split in ("validation", "test"):
        own = [{pair for pair in pairs if held_out(*pair) == split} for pairs in seen[split]]
        assert all(len(pairs) == 1 for pairs in own) and not set().union(*own) & trained
        assert len(set().union(*own)) == 5
    for name, known in (("shape", SHAPES), ("colour", COLOURS)):  # each is seen, with others
        assert {dict(shape=s, colour=c)[name] for s, c in trained} == {*known}


def test_the_training_split_has_the_size_that_is_asked_for():
    assert len(sources.open_source("shapes/scenes", size=30)) == 30
    assert len(sources.open_source("shapes/scenes", "test", size=30)) == 500
    with pytest.raises(DataError, match="options.size is for shapes/scenes alone; leave it out"):
        sources.open_source("shapes/en", size=30)


def test_a_thing_says_its_corner_and_is_a_value():
    assert RED.corner == "top left" and BLUE.corner == "bottom right"
    assert RED.words == "a small red circle"
    assert dataclasses.replace(RED, shape="").words == "a small red shape of no name"
