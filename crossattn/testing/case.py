"""A conformance case: the inputs of a call of attend, and the float64 oracle's results for them.

Most cases share one shape (`array` and `case` fill it in), so that an implementation compiles once and
the cases differ only in what may be read. The axes are B=2, T=5, S=7, N=4, K=2, H=8, Hv=8 where
nothing else is said.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossattn.testing import oracle

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
QUERY, KEY = np.arange(T)[:, None], np.arange(S)[None, :]


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of one call, and what the oracle should believe is readable.

    Attributes:
      q, k, v: numpy arrays [*B T N H], [*B S K H], [*B S K Hv].
      mask: what attend is given: a ``Mask``, a boolean array [*#B #N #T #S] or None.
      allowed: the same for the oracle, a numpy array.
      bias: float32 [*#B #N #T #S] or None.
      options: scale and softcap, where they are given.
      gradients: whether its gradients can be told apart from rounding.
    """

    name: str
    q: Any
    k: Any
    v: Any
    mask: Any = None
    allowed: Any = None
    bias: Any = None
    options: dict = dataclasses.field(default_factory=dict)
    gradients: bool = True

    def __str__(self):
        return self.name

    @property
    def arrays(self):
        """Differentiable inputs by name."""
        arrays = {"q": self.q, "k": self.k, "v": self.v, "bias": self.bias}
        return {name: array for name, array in arrays.items() if array is not None}

    @property
    def shared(self):
        """True where q, k and v have the shape and dtype of most cases."""
        like = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, H)}
        arrays = {name: getattr(self, name) for name in like}
        return all(x.shape == like[n] and x.dtype == np.float32 for n, x in arrays.items())

    @property
    def weights_shape(self):
        """[*B N T S]."""
        *batch, queries, heads, _ = self.q.shape
        return (*batch, heads, queries, self.k.shape[-3])

    @functools.cached_property
    def readable(self):
        """Bool [*B N T S], bias of -inf included."""
        return oracle.readable(self.weights_shape, self.allowed, self.bias)

    @functools.cached_property
    def expected(self):
        """Output [*B T N Hv], weights [*B N T S] and log-sum-exp [*B N T] of the oracle."""
        with np.errstate(all="ignore"):
            return oracle.attention(**self.arrays, allowed=self.allowed, **self.options)

    @functools.cached_property
    def expected_gradients(self):
        """The oracle's gradients of sum(cotangent * output), by name."""
        return self._gradients()

    @functools.cached_property
    def expected_gradients_with_lse(self):
        """The oracle's gradients of sum(cotangent * output) + sum(lse_cotangent * lse), by name."""
        return self._gradients(d_lse=self.lse_cotangent)

    def _gradients(self, **more):
        arguments = {**self.arrays, **self.options, **more}
        with np.errstate(all="ignore"):
            return oracle.gradients(self.cotangent, **arguments, allowed=self.allowed)

    @functools.cached_property
    def cotangent(self):
        """[*B T N Hv], in the dtype of q."""
        shape = (*self.q.shape[:-1], self.v.shape[-1])
        return array("cotangent", *shape).astype(self.q.dtype)

    @functools.cached_property
    def lse_cotangent(self):
        """float32 [*B N T]."""
        return array("lse_cotangent", *self.weights_shape[:-1])

    @functools.cached_property
    def reads_nothing(self):
        """Bool [*B T N]: queries that may read no key."""
        return ~np.moveaxis(self.readable.any(-1), -2, -1)

    @functools.cached_property
    def clean(self):
        """Bool [*B T N]: queries that may read no NaN and no Inf."""
        poison: Any = ~np.isfinite(oracle.float64(self.k)).all(-1) | ~np.isfinite(
            oracle.float64(self.v)
        ).all(-1)
        poison = np.repeat(poison, self.q.shape[-2] // self.k.shape[-2], axis=-1)
        poison = np.moveaxis(poison, -1, -2)[..., None, :]
        return np.moveaxis(~(poison & self.readable).any(-1), -1, -2)


def array(name, *shape):
    """Returns standard normal float32, the same every time for the same name and shape."""
    seed = [*name.encode(), *shape]
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def qkv(batch=B):
    """Returns q, k and v of the shared shape, as JAX's arrays."""
    shapes = {"q": (batch, T, N, H), "k": (batch, S, K, H), "v": (batch, S, K, H)}
    return tuple(jnp.asarray(array(name, *shape)) for name, shape in shapes.items())


def case(name, mask=None, allowed=None, **changes):
    """Returns a case of the shared shape, with arrays of batch axes for `allowed` left as [*B N T S]."""
    arrays = {"q": array("q", B, T, N, H), "k": array("k", B, S, K, H), "v": array("v", B, S, K, H)}
    return Case(name, **{**arrays, "mask": mask, "allowed": allowed, **changes})


def shaped(name, batch=(B,), t=T, s=S, n=N, k=K, h=H, hv=None, **changes):
    """Returns a case of another shape."""
    hv = h if hv is None else hv
    return Case(name, array("q", *batch, t, n, h), array("k", *batch, s, k, h),
                array("v", *batch, s, k, hv), **changes)  # fmt: skip
