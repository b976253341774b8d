"""A page with its regions: a box a region, a colour a class, darker where more was read."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from crossattn import viz

IMAGE = np.full((60, 40), 255, np.uint8)
BOXES = [[0.1, 0.1, 0.9, 0.2], [0.1, 0.3, 0.9, 0.5], [0.1, 0.6, 0.5, 0.9]]
CLASSES = ["title", "step", "step"]
WEIGHTS = np.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])


def regions(ax):
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def test_each_region_is_drawn_where_it_stands_in_the_colour_of_its_class():
    ax = viz.page(IMAGE, BOXES, CLASSES).axes[0]
    drawn = regions(ax)
    assert len(drawn) == 3
    for patch, (left, top, right, bottom) in zip(drawn, BOXES, strict=True):
        size = [40 * (right - left), 60 * (bottom - top)]
        np.testing.assert_allclose(patch.get_xy(), [40 * left - 0.5, 60 * top - 0.5])
        np.testing.assert_allclose([patch.get_width(), patch.get_height()], size)
    colours = [to_rgb(patch.get_edgecolor()) for patch in drawn]
    assert colours[1] == colours[2] != colours[0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["step", "title"]


def test_a_wrong_class_is_dashed_and_names_both():
    ax = viz.page(IMAGE, BOXES, CLASSES, expected=["title", "note", "step"]).axes[0]
    assert [patch.get_linestyle() == "-" for patch in regions(ax)] == [True, False, True]
    assert "1 step, not note" in [text.get_text() for text in ax.texts]


def test_what_was_read_more_is_darker_and_the_reader_is_outlined():
    figure = viz.page(IMAGE, BOXES, CLASSES, weights=WEIGHTS, region=0, title="a page")
    first, second = figure.axes[:2]
    *shaded, reader = regions(second)
    light = [sum(patch.get_facecolor()[:3]) for patch in shaded]
    assert light[2] < light[1] < light[0]
    assert reader.get_xy() == shaded[0].get_xy() and reader.get_facecolor()[3] == 0
    assert first.get_title("left") == "a page"
    assert second.get_title("left") == "read by region 0, title"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(image=np.zeros((4, 4, 2))), r"image has shape \[4, 4, 2\]"),
        (dict(image=np.full((4, 4), 3.0)), "image has values outside 0 to 1"),
        (
            dict(boxes=np.zeros((0, 4))),
            r"boxes has shape \[0, 4\]; expected \[n, 4\], at least one",
        ),
        (dict(boxes=[*BOXES[:2], [0.5, 0, 1.2, 1]]), "box 2 is .* in fractions of the page"),
        (dict(boxes=[*BOXES[:2], [0.5, 0.5, 0.5, 1]]), "expected left < right"),
        (dict(classes=["title"]), "classes has 1 names but boxes has 3; expected one a region"),
        (dict(expected=["title"]), "expected has 1 names but boxes has 3"),
        (dict(weights=WEIGHTS[:2]), r"weights has shape \[2, 3\] but there are 3 boxes"),
        (dict(weights=WEIGHTS * np.nan), "weights has 9 NaN"),
        (dict(weights=WEIGHTS, region=3), "region is 3; expected 0 to 2"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(changes, said):
    given = dict(image=IMAGE, boxes=BOXES, classes=CLASSES) | changes
    with pytest.raises(ValueError, match=said) as caught:
        viz.page(**given)
    assert "\n" not in str(caught.value)
