"""Texts in lines of words: darker where more was read, right to left where letters run so."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from crossattn import viz

WORDS = ["Click", "the", "OK", "button"]
READ = np.array([0.1, 0.0, 0.7, 0.2])


def drawn(figure):
    """The boxes of words, and the words by (left, down)."""
    ax = figure.axes[0]
    boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    return boxes, {text.get_text(): text.get_position() for text in figure.texts}


def test_what_was_read_more_is_darker_and_what_is_asked_for_has_a_line():
    boxes, _ = drawn(viz.texts([WORDS], [READ], outlined=[[3]]))
    light = [sum(box.get_facecolor()[:3]) for box in boxes]
    assert light[2] < light[3] < light[0] < light[1]
    lines = [box.get_linewidth() > 0 for box in boxes]
    assert lines == [False, False, False, True]


def test_dark_grounds_have_light_letters():
    figure = viz.texts([WORDS], [READ])
    colours = {text.get_text(): to_rgb(text.get_color()) for text in figure.texts}
    assert colours["OK"] == (1, 1, 1) and max(colours["the"]) < 0.5


def test_words_stand_in_lines_inside_the_figure_and_over_each_other_nowhere():
    words = [f"word{i}" for i in range(100)]
    figure = viz.texts([words], [np.full(100, 0.01)])
    boxes, _ = drawn(figure)
    left, right = figure.axes[0].get_xlim()
    lines = {}
    for box in boxes:
        assert left <= box.get_x() and box.get_x() + box.get_width() <= right
        lines.setdefault(box.get_y(), []).append(box)
    assert len(lines) > 5
    for line in lines.values():
        ends = [box.get_x() + box.get_width() for box in line]
        assert all(end <= after.get_x() + 1e-6 for end, after in zip(ends, line[1:], strict=False))
    bottom = max(box.get_y() + box.get_height() for box in boxes)
    assert bottom < max(figure.axes[0].get_ylim())


def test_texts_follow_each_other_below_their_titles():
    _, places = drawn(viz.texts([["a"], ["b"]], [[1.0], [0.5]], titles=["first", ""]))
    assert places["first"][1] < places["a"][1] < places["b"][1]


def test_one_scale_of_colours_serves_all_texts():
    boxes, _ = drawn(viz.texts([["a", "b"], ["c"]], [[0.2, 0.8], [0.2]]))
    assert boxes[0].get_facecolor() == boxes[2].get_facecolor() != boxes[1].get_facecolor()


def test_a_script_that_runs_to_the_left_begins_at_the_right():
    _, places = drawn(viz.texts([["שלום", "עולם"]], [[0.5, 0.5]]))
    assert places["שלום"][0] > places["עולם"][0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(words=[], weights=[]), "weights has 0 entries and words 0 texts"),
        (dict(weights=[READ, READ]), "weights has 2 entries and words 1 texts; expected one for"),
        (dict(titles=["a", "b"]), "titles has 2 entries and words 1 texts"),
        (dict(outlined=[]), "outlined has 0 entries and words 1 texts"),
        (dict(weights=[READ[:3]]), r"a text has 4 words, 3 weights and outlined \[\]; expected a"),
        (dict(outlined=[[4]]), r"a text has 4 words, 4 weights and outlined \[4\]"),
        (dict(weights=[-READ]), "weights are negative; expected 0 or more"),
        (dict(weights=[READ * np.nan]), "weights has 4 NaN"),
        (dict(weights=[READ[None]]), r"weights has shape \[1, 4\] but \[S\] is expected"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(changes, said):
    with pytest.raises(ValueError, match=said) as caught:
        viz.texts(**(dict(words=[WORDS], weights=[READ]) | changes))
    assert "\n" not in str(caught.value)
