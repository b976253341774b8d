"""Pictures as sequences: patches, learnt tokens before them, and positions.

Positions are learnt for one picture size, and interpolated for others.
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
      image_size: height and width of the learnt positions.
      patch_size: side of a patch, P, or its height and width; the remainder at the right and below is
        cut off.
      channels: of a pixel, C.
      dim: D.
      class_token: add a learnt vector before the patches.
      distillation_token: add another one after it, which learns from a teacher (Touvron et al. 2021).
      use_bias: a bias in the projection of patches.
      dtype: computation dtype.

    Raises:
      ValueError: a picture of this size has no patch.
    Source: Dosovitskiy et al. 2021, equation 1.
    """

    def __init__(
        self,
        image_size: Size,
        patch_size: int | Size,
        channels: int,
        dim: int,
        *,
        class_token: bool = True,
        distillation_token: bool = False,
        use_bias: bool = True,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        self.patch_size = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        self.channels, self.dtype = channels, dtype
        self.grid_size = self.grid(image_size)
        shape = (channels, *self.patch_size)
        self.projection = linear(
            shape,
            dim,
            in_axes=("channels", None, None),
            out_axes=("embed",),
            use_bias=use_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.class_token = _token(dim, rngs) if class_token else None
        self.distillation_token = _token(dim, rngs) if distillation_token else None
        self.tokens = class_token + distillation_token
        count = math.prod(self.grid_size) + self.tokens
        self.positions = LearnedPositions(count, dim, rngs=rngs)

    def grid(self, image_size: Size) -> Size:
        """Returns the rows and columns of patches of a picture, see ``patch_grid``."""
        return patch_grid(image_size, self.patch_size)

    @on_any_mesh
    def __call__(self, image: Float[Array, "*B H W C"]) -> Float[Array, "*B S D"]:
        """Computes vectors of the tokens and the patches, with their positions.

        Raises:
          ValueError: the picture has other channels, or is smaller than a patch.
        """
        *batch, height, width, channels = image.shape
        if channels != self.channels:
            raise ValueError(
                f"the picture has {channels} channels; expected {self.channels}, [H W {self.channels}]."
            )
        (rows, columns), (tall, wide) = self.grid((height, width)), self.patch_size
        image = image[..., : rows * tall, : columns * wide, :]
        patches = image.reshape(*batch, rows, tall, columns, wide, channels)
        first = len(batch)
        order = (*range(first), first, first + 2, first + 4, first + 1, first + 3)
        patches = patches.transpose(order).reshape(*batch, rows * columns, channels, tall, wide)
        x = self.projection(patches)
        tokens = [
            token for token in (self.class_token, self.distillation_token) if token is not None
        ]
        first = [jnp.broadcast_to(t[...].astype(x.dtype), (*batch, 1, x.shape[-1])) for t in tokens]
        x = jnp.concatenate([*first, x], axis=-2)
        return placed(x + self._positions((rows, columns)).astype(x.dtype), "embed")

    def on_grid(
        self, read: Float[Array, "*B S"], image: Float[Array, "*B H W C"], size: Size | None = None
    ) -> Float[Array, "*B h w"]:
        """Reshapes a number for each patch of pictures to rows and columns; ``size`` is their scaled size."""
        *batch, height, width, _ = image.shape
        return read.reshape(*batch, *self.grid(size or (height, width)))

    def _positions(self, grid: Size) -> Float[Array, "S D"]:
        """Returns positions of a grid of patches, interpolated from the learnt grid if theirs differs."""
        table = self.positions.table[...]
        if grid == self.grid_size:
            return table
        own = resized(table[self.tokens :].reshape(*self.grid_size, -1), grid)
        return jnp.concatenate([table[: self.tokens], own.reshape(math.prod(grid), -1)])


def patch_grid(image_size: Size, patch_size: int | Size) -> Size:
    """Returns the rows and columns of patches of a picture.

    Raises:
      ValueError: the picture is smaller than a patch.
    """
    tall, wide = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    height, width = image_size
    if height < tall or width < wide:
        raise ValueError(
            f"a picture of {width} x {height} pixels has no patch of {wide} x {tall}; expected a larger one, "
            "or smaller patches."
        )
    return height // tall, width // wide


def _token(dim: int, rngs: nnx.Rngs) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (1, dim)) * 0.02, axes=(None, "embed"))


def resized(image: Float[Array, "*B H W C"], size: Size) -> Float[Array, "*B h w C"]:
    """Resizes a picture, or a grid of vectors, by bicubic interpolation.

    It repeats edges and does not smooth before it reduces, as PyTorch's ``interpolate``.

    Source: Keys 1981, with a = -0.75.
    """
    if image.shape[-3:-1] == size:
        return image
    down, across = (
        jnp.asarray(_bicubic(old, new), image.dtype)
        for old, new in zip(image.shape[-3:-1], size, strict=True)
    )
    return jnp.einsum("yh,xw,...hwc->...yxc", down, across, image)


def _bicubic(old: int, new: int) -> np.ndarray:
    """Returns the interpolation weights [new old]."""
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
