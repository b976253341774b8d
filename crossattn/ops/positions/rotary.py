"""Rotary positions: rotate queries and keys so that their product depends on distance only."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from crossattn.ops.positions.sinusoids import inverse_wavelengths
from crossattn.ops.promotion import as_written
from crossattn.types import AnyArray, Array, Float, Int

_Kind = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotations for texts longer than those that a model was trained on.

    A feature pair turns ``length / wavelength`` times in a text of training. "linear" slows all pairs by
    ``factor``; "dynamic" raises the base, by as much as a call's last position is beyond ``length`` (cached
    keys keep their turns, so what a text gives depends on the calls that read it). "llama3" and "yarn" slow
    the pairs that turn ``slow`` times or less, leave those that turn ``fast`` times or more, and go over from
    one to the other in between, by turns and by pairs.

    Attributes:
      kind: which.
      factor: of wavelengths.
      length: positions of training.
      slow, fast: turns in a text of training.
      amplitude: what queries and keys are multiplied by.
      whole_pairs: "yarn" goes over from a whole number of pairs to another.

    Raises:
      ValueError: there is no such kind, or the factor is not above 0.
    Source: Chen et al. 2023; "dynamic", u/emozilla 2023; Llama 3; Peng et al. 2023, "YaRN".
    """

    kind: _Kind
    factor: float
    length: int
    slow: float = 1.0
    fast: float = 4.0
    amplitude: float = 1.0
    whole_pairs: bool = True

    def __post_init__(self):
        if self.kind not in get_args(_Kind) or not self.factor > 0:
            raise ValueError(
                f"RopeScaling got kind {self.kind!r} and factor {self.factor}; expected one of "
                f"{', '.join(get_args(_Kind))} and a factor above 0."
            )

    def frequencies(
        self, pairs: int, base: float, positions: Int[AnyArray, "..."]
    ) -> Float[AnyArray, " n"]:
        """Returns the angles by which each pair of features turns from one position to the next."""
        if self.kind == "dynamic":
            size = jnp.maximum(jnp.max(positions) + 1, self.length).astype(jnp.float32)
            beyond = self.factor * size / self.length - (self.factor - 1)
            return inverse_wavelengths(pairs, base * beyond ** (pairs / (pairs - 1)))
        whole = inverse_wavelengths(pairs, base)
        if self.kind == "linear":
            return whole / self.factor
        if self.kind == "llama3":
            turns = self.length * whole / (2 * math.pi)
            kept = (turns - self.slow) / (self.fast - self.slow)
        else:
            first, last = (self._pair(turns, pairs, base) for turns in (self.fast, self.slow))
            if self.whole_pairs:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * pairs - 1)
            kept = 1 - (np.arange(pairs) - first) / (last - first or 1e-3)
        kept = jnp.clip(jnp.asarray(kept, jnp.float32), 0, 1)
        return whole * (kept + (1 - kept) / self.factor)

    def _pair(self, turns: float, pairs: int, base: float) -> float:
        """Returns the pair that turns so many times in a text of training."""
        return pairs * math.log(self.length / (turns * 2 * math.pi)) / math.log(base)


@as_written
def rotate(
    x: Float[AnyArray, "*B T N H"],
    positions: Int[AnyArray, "*#B T"],
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
) -> Float[Array, "*B T N H"]:
    """Rotates feature pairs (i, i + H/2) of each head by ``position * base ** (-2 i / H)``.

    Raises:
      ValueError: the head size is odd.
    Source: Su et al. 2021, "RoFormer", equation 34.
    """
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise ValueError(f"rotate: head size is {x.shape[-1]}; expected an even number.")
    frequencies = inverse_wavelengths(half, base)
    if scaling is not None:
        x = x * scaling.amplitude
        frequencies = scaling.frequencies(half, base, positions)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half], x[..., half:]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
