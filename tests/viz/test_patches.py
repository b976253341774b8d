"""Heat over pictures."""

import numpy as np
import pytest

from crossattn import viz

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_panel_for_the_picture_and_one_for_each_weight(channels, tmp_path):
    heat = np.zeros((2, 3))
    heat[1, 2] = 0.5
    image = RNG.random((6, 9, channels))
    figure = viz.patches(image, {"small": heat, "large": heat[:, 1:] / 2 + 0.1}, "a boot")
    axes = figure.axes
    assert [ax.get_title() for ax in axes] == ["", "small, up to 0.50", "large, up to 0.35"]
    picture, drawn = axes[1].get_images()
    assert list(picture.get_extent()) == list(drawn.get_extent()) == [0, 9, 6, 0]
    np.testing.assert_array_equal(drawn.get_array(), heat)
    assert drawn.get_clim() == (0, 0.5) and axes[2].get_images()[1].get_clim() == (0, 0.35)
    assert viz.save(figure, tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("image", "heat", "said"),
    [
        ((4,), np.ones((2, 2)), "image has shape"),
        ((4, 4, 1), np.ones(4), "'read' have shape"),
        ((4, 4, 1), -np.ones((2, 2)), "'read' are negative"),
        ((4, 4, 1), np.full((2, 2), np.nan), "'read' are negative or not finite"),
        ((0, 4), np.ones((2, 2)), "image has shape"),
    ],
)
def test_what_is_no_heat_over_a_picture_is_refused(image, heat, said):
    with pytest.raises(ValueError, match=said):
        viz.patches(np.zeros(image), {"read": heat})


def test_many_words_stand_in_rows_of_five():
    heat = {f"Wort {i} ü": np.ones((2, 2)) / 4 for i in range(7)}
    axes = viz.patches(np.zeros((4, 4, 3)), heat, "eine Überschrift").axes
    rows = [ax.get_subplotspec().rowspan.start for ax in axes]
    assert rows == [0] * 5 + [1] * 3
    assert axes[7].get_title() == "Wort 6 ü, up to 0.25"


def test_a_page_of_pictures_has_each_with_its_caption(tmp_path):
    images = [RNG.random((6, 9, 1)), RNG.random((20, 8, 3)), RNG.random((4, 4, 3))]
    texts = ["a boot", "a very long caption that goes on and on and on", "Füße"]
    figure = viz.captions(images, texts, columns=2)
    drawn = [ax.get_xlabel() for ax in figure.axes]
    assert [text.replace("\n", " ") for text in drawn] == texts and "\n" in drawn[1]
    assert viz.save(figure, tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("shapes", "texts", "said"),
    [
        ([], [], r"0 picture\(s\) and 0 caption\(s\)"),
        ([(4, 4, 3)], ["a", "b"], r"1 picture\(s\) and 2 caption\(s\)"),
        ([(4, 4, 2)], ["a"], "image has shape"),
    ],
)
def test_what_is_no_page_of_captions_is_refused(shapes, texts, said):
    with pytest.raises(ValueError, match=said):
        viz.captions([np.zeros(shape) for shape in shapes], texts)


def test_a_picture_grows_from_left_to_right_over_a_row_for_each_word(tmp_path):
    images = [RNG.random((4, 6, 3)), RNG.integers(0, 256, (4, 6, 3), np.uint8), np.ones((4, 6, 3))]
    heat = np.arange(12.0).reshape(3, 2, 2) / 22
    figure = viz.growth(images, ["t = 1", "t = 0.5", "t = 0"], {"rot": heat, "ü": heat / 2}, "Füße")
    axes = figure.axes
    assert len(axes) == 9 and [ax.get_title() for ax in axes[:3]] == ["t = 1", "t = 0.5", "t = 0"]
    assert axes[3].get_ylabel() == "rot\nto 0.50" and axes[6].get_ylabel() == "ü\nto 0.25"
    for step in range(3):
        (drawn,) = axes[3 + step].get_images()
        np.testing.assert_array_equal(drawn.get_array(), heat[step])
        assert drawn.get_clim() == (0, 0.5)
    assert viz.save(figure, tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("count", "names", "heat", "said"),
    [
        (0, [], np.ones((0, 2, 2)), r"0 picture\(s\) and 0 name\(s\)"),
        (2, ["a"], np.ones((2, 2, 2)), r"2 picture\(s\) and 1 name\(s\)"),
        (1, ["a"], np.ones((2, 2, 2)), r"'red' have shape \(2, 2, 2\); expected \[1 h w\]"),
        (1, ["a"], -np.ones((1, 2, 2)), "'red' are negative"),
    ],
)
def test_what_does_not_grow_is_refused(count, names, heat, said):
    with pytest.raises(ValueError, match=said):
        viz.growth([np.zeros((4, 4, 3))] * count, names, {"red": heat})
