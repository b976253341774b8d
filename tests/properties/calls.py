"""Random calls of attend, with what numpy says of which key may be read. Hypothesis draws shapes, terms
and options; the numbers in the arrays come from a generator that it seeds.
"""

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from crossattn import masks as algebra
from crossattn.testing import Case
from tests.properties import generators

m: Any = algebra  # the terms take numpy arrays too, which its types do not say

FLOATS = st.sampled_from([np.float32, ml_dtypes.bfloat16, np.float16])


@st.composite
def cases(draw, batch=None, dtypes=FLOATS, poison=True):
    """A call of attend with all its options."""
    random = draw(generators)
    if batch is None:
        batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    lengths, sizes = st.sampled_from([1, 2, 3, 5, 8, 17, 33, 40]), st.sampled_from([1, 3, 4, 8, 16])
    T, S, H, Hv = draw(lengths), draw(lengths), draw(sizes), draw(sizes)
    K, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    N = K * groups
    mask, allowed = draw(masks(batch, N, T, S))
    arrays = {
        "q": random.normal(size=(*batch, T, N, H)),
        "k": random.normal(size=(*batch, S, K, H)),
        "v": random.normal(size=(*batch, S, K, Hv)),
    }
    allowed = np.broadcast_to(allowed, (*batch, N, T, S))
    if poison and draw(st.booleans()):
        _poison(draw, random, arrays, allowed)
    dtype = draw(dtypes)
    arrays = {name: array.astype(np.float32).astype(dtype) for name, array in arrays.items()}
    options = {
        "scale": draw(st.sampled_from([None, 0.1, 0.7, -0.5])),
        "softcap": draw(st.sampled_from([None, 0.5, 2.0, 30.0])),
    }
    bias = draw(st.none() | biases(batch, N, T, S))
    if mask is not None and draw(st.booleans()):
        mask = np.array(allowed)
    return Case(
        "drawn", **arrays, mask=mask, bias=bias, allowed=allowed,
        options={name: value for name, value in options.items() if value is not None},
    )  # fmt: skip


def masks(batch, N, T, S):
    """(mask, what it allows by comparisons of numbers: [*#B #N T S]); up to four terms, or None."""
    shape = batch, N, T, S
    term = st.one_of(_band(*shape), _lengths(*shape), _segments(*shape), _explicit(*shape))
    combined = st.recursive(
        term,
        lambda inner: st.tuples(inner, inner, st.booleans()).map(_both_or_either),
        max_leaves=4,
    )
    return st.just((None, np.array(True))) | combined


def _both_or_either(parts):
    (a, may_a), (b, may_b), both = parts
    return (a & b, may_a & may_b) if both else (a | b, may_a | may_b)


@st.composite
def _band(draw, batch, N, T, S):
    left, right = draw(st.sampled_from([None, 0, 2, 7])), draw(st.sampled_from([None, 0, 1, 5]))
    random, how = draw(generators), draw(st.sampled_from(["plain", "offset", "offsets", "places"]))
    queries, keys, given = np.arange(T)[:, None], np.arange(S)[None], {}
    if how == "offset":
        given = {"offset": draw(st.integers(-3, S))}
        queries = queries + given["offset"]
    elif how == "offsets" and batch:
        given = {"offset": random.integers(-3, S + 1, batch)}
        queries = (queries + given["offset"][..., None, None])[..., None, :, :]
    elif how == "places":
        given = {
            "q_positions": random.integers(0, S + 2, (*batch, T)),
            "k_positions": random.integers(0, S + 2, (*batch, S)),
        }
        queries = given["q_positions"][..., None, :, None]
        keys = given["k_positions"][..., None, None, :]
    far = keys - queries
    near = (far >= (-np.inf if left is None else -left)) & (
        far <= (np.inf if right is None else right)
    )
    return m.window(left, right, **given), near


@st.composite
def _lengths(draw, batch, N, T, S):
    random, how = draw(generators), draw(st.sampled_from(["prefix", "keys", "both", "padding"]))
    if how == "padding":
        valid = random.random((*batch, S)) < 0.7
        return m.key_padding(valid), valid[..., None, None, :]
    k, q = random.integers(0, S + 1, batch), random.integers(0, T + 1, batch)
    may = np.arange(S) < np.asarray(k)[..., None, None, None]
    if how != "both":
        return (m.prefix if how == "prefix" else m.lengths)(k), may
    return m.lengths(k, q), may & (np.arange(T)[:, None] < np.asarray(q)[..., None, None, None])


@st.composite
def _segments(draw, batch, N, T, S):
    random = draw(generators)
    q, k = (np.sort(random.integers(0, 4, (*batch, n)), -1) for n in (T, S))
    if draw(st.booleans()):
        q = random.permuted(q, axis=-1)
    same = (q[..., :, None] == k[..., None, :]) & (q > 0)[..., :, None]
    return m.segments(q, k), same[..., None, :, :]


@st.composite
def _explicit(draw, batch, N, T, S):
    shape = [draw(st.sampled_from([1, n])) for n in (*batch, N, T, S)]
    allowed = draw(generators).random(shape) < 0.6
    # Three axes without a batch are written as [1 N T S].
    return m.explicit(allowed if batch else allowed[None]), allowed


@st.composite
def biases(draw, batch, N, T, S):
    """[*#B #N #T #S] float32, -inf here and there."""
    random, shape = draw(generators), [draw(st.sampled_from([1, n])) for n in (*batch, N, T, S)]
    bias = random.normal(size=shape).astype(np.float32)
    if draw(st.booleans()):
        bias[random.random(shape) < 0.2] = -np.inf
    return bias


def _poison(draw, random, arrays, allowed):
    """NaN or Inf in keys and values, in some draws only where nobody may read."""
    *batch, N, _, S = allowed.shape
    K = arrays["k"].shape[-2]
    read = allowed.reshape(*batch, K, N // K, -1, S).any((-3, -2))  # [*B K S]
    hidden = draw(st.booleans())
    where = ~np.moveaxis(read, -2, -1) if hidden else random.random((*batch, S, K)) < 0.1
    for name in ("k", "v"):
        arrays[name][where] = draw(st.sampled_from([1.0, np.nan, np.inf, -np.inf]))
