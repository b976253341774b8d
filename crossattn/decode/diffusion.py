"""Diffusion: processes that add noise, samplers that take it away, and guidance, for any model.

    x_t = a(t) x + s(t) noise                  a process; t = 0 is the data x, t = 1 the noise
    Flow      a = 1 - t, s = t                 the model says the velocity  noise - x
    DataFlow  the same                         the model says the data
    DDPM      a^2 + s^2 = 1, by a schedule     the model says the noise
    x_u = a(u) x + sqrt(s(u)^2 - d^2) noise + d new noise     DDIM, from t to u < t, by what the model says
    x_u = x_t + (u - t) velocity                              Euler; DDIM of a flow with d = 0 is the same
    guided = (1 - w) f(x_t, t, nothing) + w f(x_t, t, words)  w = 0 unconditional, 1 conditional, exactly

A model is a function ``predict(x [B ...], time [B])``, which returns an array like ``x``. Processes and
samplers are values: frozen dataclasses. Lipman et al. let time run the other way, from noise at 0.

Source: Ho et al. 2020, "Denoising Diffusion Probabilistic Models"; Song et al. 2021, "Denoising Diffusion
Implicit Models", equations 12 and 16; Lipman et al. 2023, "Flow Matching for Generative Modeling"; Ho and
Salimans 2022, "Classifier-Free Diffusion Guidance".
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.types import AnyArray, Array, Count, Float, Key, NonNegative, Positive

Predict = Callable[[Array, Array], Array]


@runtime_checkable
class Process(Protocol):
    """How data become noise, and what a model says of it; ``time`` [B] is from 0 to 1."""

    def rates(self, time: Float[AnyArray, "*B"]) -> tuple[Array, Array]:
        """Returns a(t) and s(t), the factors of data and noise in ``x_t``."""
        ...

    def target(self, x: Array, noise: Array) -> Array:
        """Returns what the model should say."""
        ...

    def parts(self, x_t: Array, time: Array, said: Array) -> tuple[Array, Array]:
        """Returns the data and the noise that ``x_t`` is of, by what the model said."""
        ...

    def weight(self, time: Float[AnyArray, "*B"]) -> Array:
        """Returns the factor of a picture's squared error in the loss."""
        ...


@dataclass(frozen=True)
class Flow:
    """Straight lines from data to noise, whose velocity the model says.

    Source: Lipman et al. 2023, example II of section 4.1, without a least variance.
    """

    def rates(self, time: Float[AnyArray, "*B"]) -> tuple[Array, Array]:
        time = jnp.asarray(time)
        return 1 - time, time

    def target(self, x: Array, noise: Array) -> Array:
        return noise - x

    def parts(self, x_t: Array, time: Array, said: Array) -> tuple[Array, Array]:
        time = _each(time, x_t)
        return x_t - time * said, x_t + (1 - time) * said

    def weight(self, time: Float[AnyArray, "*B"]) -> Array:
        return jnp.ones_like(time)


@dataclass(frozen=True)
class DataFlow(Flow):
    """The same lines, of which the model says where they come from: it has no noise to repeat.

    The loss is the error of the velocity, ``|said - x|^2 / t^2``, but of times before ``least`` less.

    Attributes:
      least: the time up to which errors of the data weigh the same.

    Source: Li and He 2025, "Back to Basics: Let Denoising Generative Models Denoise"; a bound on the weights,
    Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy".
    """

    least: Positive = 0.3

    def target(self, x: Array, noise: Array) -> Array:
        return x

    def parts(self, x_t: Array, time: Array, said: Array) -> tuple[Array, Array]:
        time = _each(time, x_t)
        return said, (x_t - (1 - time) * said) / time

    def weight(self, time: Float[AnyArray, "*B"]) -> Array:
        return 1 / jnp.maximum(time, self.least) ** 2


@dataclass(frozen=True)
class DDPM:
    """Noise of a linear schedule of variances, which the model says.

    Time t is step ``round(t steps)``, of which 0 is the data.

    Attributes:
      steps: T.
      first, last: variances of the noise that the first and the last step add.

    Source: Ho et al. 2020, equations 4 and 14, and section 4.
    """

    steps: Count = 1000
    first: Positive = 1e-4
    last: Positive = 0.02

    def rates(self, time: Float[AnyArray, "*B"]) -> tuple[Array, Array]:
        step = jnp.round(jnp.asarray(time) * self.steps).astype(jnp.int32)
        a, s = (jnp.asarray(x, jnp.float32) for x in _schedule(self.steps, self.first, self.last))
        return a[step], s[step]

    def target(self, x: Array, noise: Array) -> Array:
        return noise

    def parts(self, x_t: Array, time: Array, said: Array) -> tuple[Array, Array]:
        a, s = (_each(rate, x_t) for rate in self.rates(time))
        return (x_t - s * said) / a, said

    def weight(self, time: Float[AnyArray, "*B"]) -> Array:
        return jnp.ones_like(time)


@lru_cache
def _schedule(steps: int, first: float, last: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns a and s of the steps 0 to T, in float64."""
    kept = np.cumprod(np.append(1.0, 1 - np.linspace(first, last, steps)))
    return np.sqrt(kept), np.sqrt(1 - kept)


@runtime_checkable
class Sampler(Protocol):
    """One step of a way from noise to data; ``steps`` of them are taken."""

    @property
    def steps(self) -> int:
        """The number of steps."""
        ...

    def step(
        self, process: Process, x: Array, time: Array, until: Array, said: Array, key: Any
    ) -> Array:
        """Returns ``x`` at the time ``until`` [B], which is before ``time`` [B]; a key draws new noise."""
        ...


@dataclass(frozen=True)
class Euler:
    """Steps along the velocity of a flow, from its data to its noise.

    Attributes:
      steps: from noise to data, equal in time.
    """

    steps: Count = 25

    def step(
        self, process: Process, x: Array, time: Array, until: Array, said: Array, key: Any
    ) -> Array:
        if not isinstance(process, Flow):
            raise ValueError(
                f"Euler follows a velocity, which a {type(process).__name__} does not say; expected a Flow, "
                "or the sampler DDIM."
            )
        data, noise = process.parts(x, time, said)
        return x + _each(until - time, x) * (noise - data)


@dataclass(frozen=True)
class DDIM:
    """Estimates the data from what the model says, then adds the noise of the next time.

    Attributes:
      steps: from noise to data, equal in time.
      eta: share of the noise that is drawn anew: 0 draws none, and 1 in all steps of a DDPM is its
        ancestral sampling.
      clip: the data are cut to [-clip, clip] in each step; None leaves them.

    Source: Song et al. 2021, equations 12 and 16; the cut, Ho et al. 2020.
    """

    steps: Count = 25
    eta: NonNegative = 0.0
    clip: Positive | None = None

    def step(
        self, process: Process, x: Array, time: Array, until: Array, said: Array, key: Any
    ) -> Array:
        data, noise = process.parts(x, time, said)
        (a, s), (b, u) = process.rates(time), process.rates(until)
        if self.clip is not None:
            data = jnp.clip(data, -self.clip, self.clip)
            noise = (x - _each(a, x) * data) / _each(s, x)
        if not self.eta:
            return _each(b, x) * data + _each(u, x) * noise
        # Variance of x_u given x_t and x, which Song et al. write for a^2 + s^2 = 1.
        new = self.eta * (u / s) * jnp.sqrt(jnp.maximum(s**2 - (a / b) ** 2 * u**2, 0))
        kept = jnp.sqrt(jnp.maximum(u**2 - new**2, 0))
        drawn = jax.random.normal(key, x.shape, x.dtype)
        return _each(b, x) * data + _each(kept, x) * noise + _each(new, x) * drawn


def noised(
    process: Process,
    x: Float[Array, "B ..."],
    noise: Float[Array, "B ..."],
    time: Float[Array, " B"],
) -> tuple[Float[Array, "B ..."], Float[Array, "B ..."]]:
    """Returns data with noise, ``x_t``, and what a model should say of it."""
    a, s = process.rates(time)
    return _each(a, x) * x + _each(s, x) * noise, process.target(x, noise)


def guided(conditional: Predict, unconditional: Predict, scale: float) -> Predict:
    """Returns a model that goes beyond the conditional one, away from the unconditional one.

    Args:
      conditional, unconditional: the model with words and without.
      scale: w; 0 is exactly the unconditional model and 1 the conditional one, and neither runs the other.

    Source: Ho and Salimans 2022, equation 6, whose w is this one less 1.
    """
    if scale == 0:
        return unconditional
    if scale == 1:
        return conditional
    return lambda x, time: (1 - scale) * unconditional(x, time) + scale * conditional(x, time)


def sample(
    predict: Predict,
    noise: Float[Array, "B ..."],
    key: Key[Array, ""] | None = None,
    *,
    process: Process = Flow(),
    sampler: Sampler = Euler(),
    return_path: bool = False,
) -> Any:
    """Draws data from noise, in one loop that a compiled program holds once.

    Args:
      predict: the model, see ``guided``.
      noise: normal numbers, [B ...].
      key: draws the noise of a sampler that wants more.
      process: that the model was trained on.
      sampler: how its steps are taken.
      return_path: also return the arrays before each step [steps B ...], and their times [steps].

    Raises:
      ValueError: the sampler does not fit the process, takes more steps than it has, or draws noise and has
        no key.
    """
    if key is None and getattr(sampler, "eta", 0):
        raise ValueError("the sampler draws new noise (eta above 0); expected a key=.")
    most = getattr(process, "steps", sampler.steps)
    if sampler.steps > most:
        raise ValueError(
            f"the sampler takes {sampler.steps} steps, but the process has {most}; expected at most that."
        )
    keys = None if key is None else jax.random.split(key, sampler.steps)
    times = jnp.linspace(1.0, 0.0, sampler.steps + 1)

    def step(x: Array, given: Any) -> tuple[Array, Any]:
        time, until, own = given
        time, until = (jnp.full(len(x), t) for t in (time, until))
        moved = sampler.step(process, x, time, until, predict(x, time), own)
        return moved.astype(x.dtype), x if return_path else None

    x, path = jax.lax.scan(step, noise, (times[:-1], times[1:], keys))
    return (x, path, times[:-1]) if return_path else x


def _each(rate: Array, x: Array) -> Array:
    """Returns a number of each example [B] for arrays [B ...]."""
    return jnp.asarray(rate, x.dtype).reshape(*rate.shape, *(1,) * (x.ndim - rate.ndim))
