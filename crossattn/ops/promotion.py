"""Broadcasts and promotions of this package, also where a program asks JAX to refuse them.

``jax_numpy_rank_promotion="raise"`` and ``jax_numpy_dtype_promotion="strict"`` are for the code of whoever
sets them; inside ``as_written`` they are as the package's own code expects.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def as_written(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Runs ``call`` under JAX's default rules. JAX may trace rules of derivatives later: they need it too."""

    @functools.wraps(call)
    def inside(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        ranks, dtypes = jax.config.jax_numpy_rank_promotion, jax.config.jax_numpy_dtype_promotion
        if (ranks, dtypes) == ("allow", "standard"):
            return call(*args, **kwargs)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return call(*args, **kwargs)

    return inside


def widened(dtype: Any) -> Any:
    """Returns the dtype in which sums are computed: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)
