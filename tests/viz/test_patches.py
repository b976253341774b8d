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
    figure = viz.patches(image, {"small": heat, "large": heat[:, :1]}, "a boot")
    axes = figure.axes
    assert [ax.get_title() for ax in axes] == ["", "small, up to 0.50", "large, up to 0.00"]
    picture, drawn = axes[1].get_images()
    assert list(picture.get_extent()) == list(drawn.get_extent()) == [0, 9, 6, 0]
    np.testing.assert_array_equal(drawn.get_array(), heat)
    assert viz.save(figure, tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("image", "heat", "said"),
    [
        ((4, 4), np.ones((2, 2)), "image has shape"),
        ((4, 4, 2), np.ones((2, 2)), "image has shape"),
        ((4, 4, 1), np.ones(4), "'read' have shape"),
        ((4, 4, 1), -np.ones((2, 2)), "'read' are negative"),
        ((4, 4, 1), np.full((2, 2), np.nan), "'read' are negative or not finite"),
    ],
)
def test_what_is_no_heat_over_a_picture_is_refused(image, heat, said):
    with pytest.raises(ValueError, match=said):
        viz.patches(np.zeros(image), {"read": heat})
