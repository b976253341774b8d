"""Shares of attention: of maps made by hand, on skin that is known, by words that say a tone."""

import io

import jax
import numpy as np
import pytest
from PIL import Image

from configs import emoji_captions
from crossattn.data.features import Image as Picture
from experiments.bench import word_maps
from experiments.tasks import make_task

LIGHT, DARK = "1F3FB", "1F3FF"


@pytest.fixture(scope="module")
def task():
    return make_task(emoji_captions.get_config("tiny"))


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def emoji(code, caption, skin, family="a"):
    """A face of one colour, columns 4 to 7 of rows 0 to 7, over a blue cloth; the rest is transparent."""
    pixels = np.zeros((16, 16, 4), np.uint8)
    pixels[8:, 4:12] = (0, 0, 200, 255)
    pixels[:8, 4:8] = (*skin, 255)
    return {"id": code, "group": family, "source": png(pixels), "target": ("en", caption)}


EXAMPLES = [
    emoji("1F9D1-200D-2695-FE0F/en", "a doctor", (250, 200, 0)),
    emoji(f"1F9D1-{LIGHT}-200D-2695-FE0F/en", "a doctor: light skin", (240, 210, 190)),
    emoji(f"1F9D1-{DARK}-200D-2695-FE0F/en", "a doctor: dark skin", (90, 60, 40)),
    emoji("1F680/en", "a rocket", (9, 9, 9), "b"),
    emoji(f"1F46B-{LIGHT}-{DARK}/en", "a pair: light skin, dark skin", (9, 9, 9), "c"),
]


def test_skin_is_where_tones_differ_and_the_drawing_where_it_is_opaque():
    feature = Picture(16, 16)
    skin = np.zeros((16, 16))
    skin[:8, 4:8] = 1
    found = word_maps.skins(feature, EXAMPLES)
    assert found.keys() == {1, 2}
    for part in found.values():
        np.testing.assert_array_equal(part, skin)
    drawn = word_maps.opacity(feature, EXAMPLES[1]["source"])
    assert drawn.sum() == 32 + 64 and drawn[:, :4].sum() == 0
    patches = word_maps.covered(drawn, (4, 4))
    np.testing.assert_array_equal(patches, [[0, 1, 0, 0]] * 2 + [[0, 1, 1, 0]] * 2)


def test_words_that_say_a_tone_are_those_that_are_not_in_the_caption_without_one(task):
    assert word_maps.said_tones(task, EXAMPLES) == {1: {"light", "skin"}, 2: {"dark", "skin"}}


def test_lines_have_the_shares_of_maps_made_by_hand(task):
    """Words of the tone attend to the face alone, others evenly to the whole picture."""
    face = np.zeros((4, 4))
    face[:2, 1] = 0.5
    even = np.full((4, 4), 1 / 16)
    maps = []
    for example in EXAMPLES:
        words = example["target"][1].split()
        maps.append({w: face if w in ("light", "dark", "skin") else even for w in words})
    examples = [e | {"target": e["target"]} for e in EXAMPLES[:3]]
    lines = [line.split("(")[0].split() for line in word_maps.skin(task, examples, maps[:3])]
    assert lines[0] == "2 pictures with a tone".split()
    assert [float(line[-1]) for line in lines[1:]] == [1, 0.125, pytest.approx(1 / 3, 1e-3), 0.125]
    drawn, area = word_maps.drawing(task, examples[:1], maps[:1])
    assert float(drawn.split("(")[0].split()[-1]) == 6 / 16 == float(area.split("(")[0].split()[-1])
    assert word_maps.skin(task, EXAMPLES[3:], maps[3:]) == []


def test_maps_of_words_sum_to_one_whatever_the_batch(task, monkeypatch):
    params = jax.jit(task.init)(jax.random.key(0))
    examples = [task.examples("validation")[i] for i in range(5)]
    found = word_maps.word_maps(task, params, examples)
    for example, own in zip(examples, found, strict=True):
        assert len(own) == len(task.text_of(example).split())
        for heat in own.values():
            assert heat.shape == (4, 4) and heat.sum() == pytest.approx(1)
    monkeypatch.setattr(word_maps, "_ROWS", 2)
    for own, other in zip(word_maps.word_maps(task, params, examples), found, strict=True):
        for word, heat in own.items():
            np.testing.assert_allclose(heat, other[word], rtol=1e-4)
