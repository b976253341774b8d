"""Pictures as sequences: patches, a class token, and where each patch stands.

The one thing to know: positions are learnt for pictures of one size, and interpolated for others.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossattn.axes import placed
from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.positions import LearnedPositions
from crossattn.types import Array, Float

Size = tuple[int, int]


class PatchEmbedding(nnx.Module):
    """A picture [*B H W C] to vectors [*B S D]: a class token, then a patch each, row by row.

    Args:
      image_size: height and width for which there are positions.
      patch_size: side of a patch, P; what stands over at the right and below is cut off.
      channels: of a pixel, C.
      dim: D.
      class_token: a learnt vector stands before the patches.
      dtype: computation dtype.

    Raises:
      ValueError: a picture of this size has no patch.
    Source: Dosovitskiy et al. 2021, equation 1.
    """

    def __init__(
        self,
        image_size: Size,
        patch_size: int,
        channels: int,
        dim: int,
        *,
        class_token: bool = True,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        self.patch_size, self.channels, self.dtype = patch_size, channels, dtype
        self.grid_size = self.grid(image_size)
        shape = (channels, patch_size, patch_size)
        self.projection = linear(
            shape,
            dim,
            in_axes=("channels", None, None),
            out_axes=("embed",),
            dtype=dtype,
            rngs=rngs,
        )
        self.class_token = (
            nnx.Param(jax.random.normal(rngs.params(), (1, dim)) * 0.02, axes=(None, "embed"))
            if class_token
            else None
        )
        count = math.prod(self.grid_size) + class_token
        self.positions = LearnedPositions(count, dim, rngs=rngs)

    def grid(self, image_size: Size) -> Size:
        """Rows and columns of the patches of a picture.

        Raises:
          ValueError: it has none.
        """
        rows, columns = (size // self.patch_size for size in image_size)
        if not rows * columns:
            height, width = image_size
            raise ValueError(
                f"a picture of {width} x {height} pixels has no patch of {self.patch_size} x "
                f"{self.patch_size}; expected a larger one, or smaller patches."
            )
        return rows, columns

    @on_any_mesh
    def __call__(self, image: Float[Array, "*B H W C"]) -> Float[Array, "*B S D"]:
        """Vectors of the class token and the patches, where they stand added.

        Raises:
          ValueError: the picture has other channels, or is smaller than a patch.
        """
        *batch, height, width, channels = image.shape
        if channels != self.channels:
            raise ValueError(
                f"the picture has {channels} channels; expected {self.channels}, [H W {self.channels}]."
            )
        (rows, columns), side = self.grid((height, width)), self.patch_size
        image = image[..., : rows * side, : columns * side, :]
        patches = image.reshape(*batch, rows, side, columns, side, channels)
        first = len(batch)
        order = (*range(first), first, first + 2, first + 4, first + 1, first + 3)
        patches = patches.transpose(order).reshape(*batch, rows * columns, channels, side, side)
        x = self.projection(patches)
        if self.class_token is not None:
            token = jnp.broadcast_to(
                self.class_token[...].astype(x.dtype), (*batch, 1, x.shape[-1])
            )
            x = jnp.concatenate([token, x], axis=-2)
        return placed(x + self._positions((rows, columns)).astype(x.dtype), "embed")

    def _positions(self, grid: Size) -> Float[Array, "S D"]:
        """Positions of a grid of patches, interpolated where it is another than that they were learnt for."""
        table = self.positions.table[...]
        if grid == self.grid_size:
            return table
        first = len(table) - math.prod(self.grid_size)
        own = resized(table[first:].reshape(*self.grid_size, -1), grid)
        return jnp.concatenate([table[:first], own.reshape(math.prod(grid), -1)])


def resized(image: Float[Array, "*B H W C"], size: Size) -> Float[Array, "*B h w C"]:
    """A picture, or a grid of vectors, of another height and width, by bicubic interpolation.

    Edges are repeated, and nothing is smoothed before a picture is made smaller: what ``interpolate`` of
    PyTorch computes. Source: Keys 1981, with a = -0.75.
    """
    if image.shape[-3:-1] == size:
        return image
    down, across = (
        jnp.asarray(_bicubic(old, new), image.dtype)
        for old, new in zip(image.shape[-3:-1], size, strict=True)
    )
    return jnp.einsum("yh,xw,...hwc->...yxc", down, across, image)


def _bicubic(old: int, new: int) -> np.ndarray:
    """What each of the new points takes of each of the old, [new old]."""
    at = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(at).astype(int)
    found, a = np.zeros((new, old)), -0.75
    for tap in range(-1, 3):
        far = np.abs(at - first - tap)
        near = ((a + 2) * far - (a + 3)) * far**2 + 1
        tail = ((far - 5) * far + 8) * far * a - 4 * a
        index = np.clip(first + tap, 0, old - 1)
        np.add.at(found, (np.arange(new), index), np.where(far <= 1, near, tail))
    return found
