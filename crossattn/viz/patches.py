"""What was read of a picture: heat over its patches.

Imports matplotlib only when it draws.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDE = 2.6  # inches of a panel
_COLUMNS = 5
_HEAT = "inferno"


def patches(
    image: Float[np.ndarray, "..."],
    weights: Mapping[str, Float[np.ndarray, "..."]],
    title: str = "",
) -> "Figure":
    """A picture, and beside it once for each of the weights, with heat over its patches; five in a row.

    Args:
      image: [H W C], values from 0 to 1, of 1 or 3 channels.
      weights: by what is written over each panel, how much was read of each patch of a grid [h w] over the
        whole picture. The colours of a panel go from 0 to its largest weight, which its title names.
      title: what stands above all.

    Raises:
      ValueError: the picture or a weight has another shape, or weights are negative or not finite.
    """
    _check(image, weights)
    from crossattn.viz.figure import Picture
    from crossattn.viz.fonts import headline

    height, width = image.shape[:2]
    figure, count = Picture(), 1 + len(weights)
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    tall = rows * (_SIDE * height / width + 0.35)
    figure.set_size_inches(_SIDE * columns, tall + (0.25 if title else 0))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax in axes[count:]:
        ax.remove()
    edges = (0, width, height, 0)
    shown = image[..., 0] if image.shape[-1] == 1 else image
    for ax, (name, heat) in zip(axes, [("", None), *weights.items()], strict=False):
        ax.imshow(shown, cmap="gray", vmin=0, vmax=1, extent=edges, interpolation="nearest")
        ax.set_axis_off()
        if heat is not None:
            top = float(heat.max()) or 1.0
            colours = dict(cmap=_HEAT, vmin=0, vmax=top, alpha=0.65)
            ax.imshow(heat, **colours, extent=edges, interpolation="nearest")
            above = headline(f"{name}, up to {heat.max():.2f}")
            ax.set_title(above.text, fontsize=9, **above.style)
    if title:
        above = headline(title)
        figure.suptitle(above.text, fontsize=11, **above.style)
    return figure


def _check(image: np.ndarray, weights: Mapping[str, np.ndarray]) -> None:
    if image.ndim != 3 or image.shape[-1] not in (1, 3) or 0 in image.shape:
        raise ValueError(f"image has shape {image.shape}; expected [H W 1] or [H W 3].")
    for name, heat in weights.items():
        if heat.ndim != 2 or 0 in heat.shape:
            raise ValueError(f"the weights {name!r} have shape {heat.shape}; expected [h w].")
        if not (np.isfinite(heat).all() and (heat >= 0).all()):
            raise ValueError(
                f"the weights {name!r} are negative or not finite; expected 0 or more."
            )
