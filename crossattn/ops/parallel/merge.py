"""Attention over a memory in parts: each part's output and log-sum-exp give those of the whole.

A part is what ``attend(..., return_lse=True)`` returns. Sharded, streamed, cached plus new: wherever
the keys of a query lie in several places, attend to each and ``merge``. Parts may come in any order and
grouping; one that had nothing to read changes nothing.

A float32 log-sum-exp of 10,000 is exact to 0.001, and then so are the shares of the parts: with logits
that large, expect three digits.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3.1; in this
form Dao 2023, "FlashAttention-2", section 2.3.
"""

from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops.call import by_query, named
from crossattn.ops.parallel import placement
from crossattn.ops.promotion import as_written, widened
from crossattn.types import AnyArray, Array, Float


@as_written
def merge(
    out1: Float[AnyArray, "*B T N Hv"],
    lse1: Float[AnyArray, "*B N T"],
    out2: Float[AnyArray, "*B T N Hv"],
    lse2: Float[AnyArray, "*B N T"],
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B N T"]]:
    """Returns what ``attend`` gives for the keys of both parts.

    For many parts, carry the pair through ``lax.scan``, or use
    ``lax.associative_scan(lambda a, b: merge(*a, *b), (outs, lses))``.

    Args:
      out1: output of the first part [*B T N Hv].
      lse1: its log-sum-exp [*B N T], -inf where a query read nothing.
      out2: output of the second part, of the same shape.
      lse2: its log-sum-exp.

    Returns:
      The output in out1's dtype and the log-sum-exp in lse1's. Sums are float32 at least; a query
      that read nothing in either part gets exactly 0 and -inf, and gradients 0.

    Raises:
      ValueError: shapes of the parts differ, or a log-sum-exp does not go with its output.
    """
    _check(out1, lse1, out2, lse2)
    parts = tuple(jnp.asarray(x) for x in (out1, lse1, out2, lse2))
    mesh = placement.mesh_of(parts)
    if mesh is None:
        return _merged(*parts)
    names = (named(out1, "T", "N", None), named(lse1, "N", "T")) * 2
    split = placement.Split.of(mesh, parts, names)
    return split.run_elementwise(_merged, parts, names, names[:2])


def _merged(out1: Array, lse1: Array, out2: Array, lse2: Array) -> tuple[Array, Array]:
    outs, lses = (out1, out2), (lse1, lse2)
    base = base_of(jnp.maximum(*lses))
    weights = [weight_of(lse, base) for lse in lses]
    sums = [weighted(*part) for part in zip(outs, weights, strict=True)]
    return quotient(sums[0] + sums[1], weights[0] + weights[1], base, outs[0].dtype)


@as_written
def merge_over(
    out: Float[AnyArray, "*B T N Hv"], lse: Float[AnyArray, "*B N T"], axis: str | tuple[str, ...]
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B N T"]]:
    """Merges the parts that the devices along a mesh axis hold, inside ``jax.shard_map``.

    Every device gets the whole; moved is one float32 output and two numbers for each query and head.
    """
    base = base_of(jax.lax.pmax(jax.lax.stop_gradient(lse), axis))
    weight = weight_of(lse, base)
    numerator, total = jax.lax.psum((weighted(out, weight), weight), axis)
    return quotient(numerator, total, base, out.dtype)


def base_of(peak: Float[Array, "*B N T"]) -> Float[Array, "*B N T"]:
    """Returns the reference value of the exponents; 0 where nothing was read, for -inf - -inf is NaN."""
    # The result does not depend on it, so neither does the gradient.
    peak = jax.lax.stop_gradient(peak)
    return jnp.where(peak == -jnp.inf, 0, peak)


def weight_of(
    lse: Float[AnyArray, "*B N T"], base: Float[Array, "*B N T"]
) -> Float[Array, "*B N T"]:
    """Returns a part's share before division; 0, gradient and all, where it read nothing."""
    return jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - base))


def weighted(out: Float[AnyArray, "*B T N Hv"], weight: Float[Array, "*B N T"]) -> Array:
    """Returns the output times its weight, in float32 at least."""
    compute = widened(out.dtype)
    return jnp.asarray(out).astype(compute) * by_query(weight).astype(compute)


def quotient(numerator: Array, total: Array, base: Array, dtype: Any) -> tuple[Array, Array]:
    """Returns output and log-sum-exp of weighted outputs [*B T N Hv] and their total weight [*B N T]."""
    nothing = total == 0
    divisor = jnp.where(nothing, 1, total)
    lse = jnp.where(nothing, -jnp.inf, base + jnp.log(divisor))
    return (numerator / by_query(divisor)).astype(dtype), lse


def _check(out1: AnyArray, lse1: AnyArray, out2: AnyArray, lse2: AnyArray) -> None:
    if jnp.ndim(out1) < 3:
        raise ValueError(f"out1 has shape {jnp.shape(out1)}; expected [*B T N Hv].")
    *batch, T, N, _ = jnp.shape(out1)
    wanted = {"lse1": (*batch, N, T), "out2": jnp.shape(out1), "lse2": (*batch, N, T)}
    for (name, shape), x in zip(wanted.items(), (lse1, out2, lse2), strict=True):
        if jnp.shape(x) != shape:
            raise ValueError(
                f"{name} has shape {jnp.shape(x)}; expected {shape}: out1 is [*B T N Hv] = "
                f"{jnp.shape(out1)}, a log-sum-exp is [*B N T]."
            )
