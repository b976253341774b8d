"""A spectrogram, and beneath it the attention of its frames to letters."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from crossattn.viz.checks import checked_tokens, checked_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _SECOND = 2.0, 2.6  # inches beside the frames, and of a second of them
_LETTER = 0.13  # inches


def speech(
    frames: Float[np.ndarray, "F M"],
    weights: Float[np.ndarray, "T S"],
    letters: Sequence[str],
    *,
    rate: float = 100.0,
    title: str | None = None,
) -> "Figure":
    """Draws frames over time, low bands below, and beneath them the weights with which they read letters.

    Args:
      frames: of a spectrogram.
      weights: cross-attention; row t is that of the frames from t F / T on.
      letters: S strings, drawn from top to bottom.
      rate: frames a second.
      title: a line above the picture.

    Raises:
      ValueError: wrong rank, NaN or infinity, no frames, or not as many letters as columns of weights.
    """
    values = checked_weights(weights, "T, S")
    shown = checked_weights(frames, "F, M", name="frames")
    checked_tokens(values.shape, letters, [""] * len(values))

    from crossattn.viz.figure import GREY, Picture, label, labels

    seconds = len(shown) / rate
    names = labels(letters)
    figure = Picture()
    figure.set_size_inches(_WIDTH + _SECOND * max(seconds, 1.0), 2.6 + _LETTER * len(names))
    upper, lower = figure.subplots(
        2, 1, sharex=True, height_ratios=[2.0, _LETTER * len(names) + 0.4]
    )
    options = dict(aspect="auto", interpolation="nearest")
    upper.imshow(
        shown.T, origin="lower", cmap="magma", extent=(0, seconds, 0, shown.shape[1]), **options
    )
    upper.set_ylabel("mel band", fontsize=8, color=GREY)
    lower.imshow(values.T, cmap="Blues", extent=(0, seconds, len(names), 0), **options)
    lower.set_yticks(np.arange(len(names)) + 0.5, [own.text for own in names], fontsize=7)
    for tick, own in zip(lower.get_yticklabels(), names, strict=True):
        tick.set(**own.style)
    lower.set_xlabel("seconds", fontsize=8, color=GREY)
    for ax in (upper, lower):
        ax.tick_params(labelsize=7, length=2, colors=GREY)
    if title is not None:
        above = label(title)
        figure.suptitle(above.text, fontsize=9, **above.style)
    return figure
