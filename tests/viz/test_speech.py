"""A spectrogram over the letters that it reads: what is drawn where, and what is refused."""

import numpy as np
import pytest

from crossattn import viz

RNG = np.random.default_rng(0)
FRAMES = RNG.normal(size=(60, 8)).astype(np.float32)
WEIGHTS = RNG.dirichlet(np.ones(3), size=12).astype(np.float32)
LETTERS = ["a", " ", "é"]


def test_frames_and_weights_share_their_seconds_and_letters_go_down():
    figure = viz.speech(FRAMES, WEIGHTS, LETTERS, title="a é")
    upper, lower = figure.axes
    (above,), (below,) = upper.get_images(), lower.get_images()
    np.testing.assert_array_equal(above.get_array(), FRAMES.T)
    np.testing.assert_array_equal(below.get_array(), WEIGHTS.T)
    assert above.get_extent() == [0, 0.6, 0, 8] and above.origin == "lower"
    assert below.get_extent() == [0, 0.6, 3, 0]  # the first letter on top
    names = [tick.get_text() for tick in lower.get_yticklabels()]
    assert names[0] == "a" and names[2] == "é" and names[1].strip()  # a blank is seen
    assert figure.get_suptitle() == "a é"


@pytest.mark.parametrize(
    ("frames", "weights", "letters", "said"),
    [
        (FRAMES[0], WEIGHTS, LETTERS, "frames"),
        (np.full_like(FRAMES, np.nan), WEIGHTS, LETTERS, "frames"),
        (FRAMES[:0], WEIGHTS, LETTERS, "frames"),
        (FRAMES, WEIGHTS[None], LETTERS, "T, S"),
        (FRAMES, WEIGHTS, LETTERS[:2], "2"),
        (FRAMES, WEIGHTS * np.inf, LETTERS, "weights"),
    ],
)
def test_what_cannot_be_drawn_is_refused(in_production, frames, weights, letters, said):
    with pytest.raises(ValueError, match=said) as caught:
        viz.speech(frames, weights, letters)
    assert "\n" not in str(caught.value)
