"""Random calls of attend: shapes, masks and biases, with what numpy says of which key may be read."""

from typing import Any

import ml_dtypes
import numpy as np

from crossattn import masks as algebra
from crossattn.testing import Case

m: Any = algebra  # the terms take numpy arrays too, which its types do not say

DTYPES = (np.float32, np.float32, np.float32, ml_dtypes.bfloat16, np.float16)


def problem(random, batch=None, lengths=None, heads=None, dtype=None) -> Case:
    """A call with all its options drawn; ``batch`` and ``lengths`` and ``heads`` may be given."""
    if batch is None:
        batch = tuple(random.integers(1, 4, random.integers(0, 3)).tolist())
    T, S = lengths or random.choice([1, 2, 3, 5, 8, 17, 33, 40], 2).tolist()
    K = int(random.integers(1, 4)) if heads is None else heads
    N, H, Hv = K * int(random.integers(1, 4)), *random.choice([1, 3, 4, 8, 16], 2).tolist()
    mask, allowed = draw_mask(random, batch, N, T, S)
    arrays = {
        "q": random.normal(size=(*batch, T, N, H)),
        "k": random.normal(size=(*batch, S, K, H)),
        "v": random.normal(size=(*batch, S, K, Hv)),
    }
    allowed = np.broadcast_to(allowed, (*batch, N, T, S))
    if random.random() < 0.3:
        _poison(random, arrays, allowed, K)
    dtype = DTYPES[random.integers(len(DTYPES))] if dtype is None else dtype
    arrays = {name: array.astype(np.float32).astype(dtype) for name, array in arrays.items()}
    options = {}
    if random.random() < 0.2:
        options["scale"] = float(random.choice([0.1, 0.7, -0.5]))
    if random.random() < 0.2:
        options["softcap"] = float(random.choice([0.5, 2.0, 30.0]))
    bias = draw_bias(random, batch, N, T, S) if random.random() < 0.3 else None
    name = f"q{list(arrays['q'].shape)} k{list(arrays['k'].shape)} {np.dtype(dtype).name}"
    said = [describe(mask), *("bias" for _ in range(bias is not None)), *options]
    return Case(f"{name} {' '.join(said)}", **arrays, mask=_form(random, mask, allowed), bias=bias,
                allowed=allowed, options=options)  # fmt: skip


def describe(mask) -> str:
    """The kinds of a mask's terms."""
    return "no mask" if mask is None else " & ".join(type(term).__name__ for term in mask.terms)


def draw_mask(random, batch, N, T, S, depth=2) -> tuple[Any, np.ndarray]:
    """A mask, and what it allows by comparisons of numbers: [*#B #N T S]."""
    how = random.random()
    if depth and how < 0.5:
        (a, may_a), (b, may_b) = (draw_mask(random, batch, N, T, S, depth - 1) for _ in range(2))
        a, b = (m.causal() if x is None else x for x in (a, b))
        may_a, may_b = (np.tri(T, S, dtype=bool) if x.ndim == 0 else x for x in (may_a, may_b))
        return (a & b, may_a & may_b) if how < 0.3 else (a | b, may_a | may_b)
    return _TERMS[random.integers(len(_TERMS))](random, batch, N, T, S)


def _nothing(random, batch, N, T, S):
    return None, np.array(True)


def _band(random, batch, N, T, S):
    left = [None, 0, 2, 7][random.integers(4)]
    right = [None, 0, 1, 5][random.integers(4)]
    queries, keys, given = np.arange(T)[:, None], np.arange(S)[None], {}
    how = random.random()
    if how < 0.3:
        given = {"offset": int(random.integers(-3, S + 1))}
        queries = queries + given["offset"]
    elif how < 0.5 and batch:
        given = {"offset": random.integers(-3, S + 1, batch)}
        queries = (queries + given["offset"][..., None, None])[..., None, :, :]
    elif how < 0.8:
        given = {
            "q_positions": random.integers(0, S + 2, (*batch, T)),
            "k_positions": random.integers(0, S + 2, (*batch, S)),
        }
        queries = given["q_positions"][..., None, :, None]
        keys = given["k_positions"][..., None, None, :]
    far = keys - queries
    may = (far >= -left if left is not None else far == far) & (
        far <= right if right is not None else far == far
    )
    return m.window(left, right, **given), may


def _lengths(random, batch, N, T, S):
    k, q = random.integers(0, S + 1, batch), random.integers(0, T + 1, batch)
    may = np.arange(S) < np.asarray(k)[..., None, None, None]
    if random.random() < 0.3:
        return m.prefix(k), may
    if random.random() < 0.5:
        return m.lengths(k), may
    rows = np.arange(T)[:, None] < np.asarray(q)[..., None, None, None]
    return m.lengths(k, q), may & rows


def _padding(random, batch, N, T, S):
    valid = random.random((*batch, S)) < 0.7
    return m.key_padding(valid), valid[..., None, None, :]


def _segments(random, batch, N, T, S):
    q, k = (np.sort(random.integers(0, 4, (*batch, n)), -1) for n in (T, S))
    if random.random() < 0.3:
        q = random.permuted(q, axis=-1)
    same = (q[..., :, None] == k[..., None, :]) & (q > 0)[..., :, None]
    return m.segments(q, k), same[..., None, :, :]


def _explicit(random, batch, N, T, S):
    shape = [*batch, N, T, S]
    shape = [1 if random.random() < 0.3 else n for n in shape]
    allowed = random.random(shape) < 0.6
    return explicit(allowed), allowed


def explicit(allowed) -> Any:
    """A matrix that has all axes; three of them without a batch are written as [1 N T S]."""
    return m.explicit(allowed[None] if allowed.ndim == 3 else allowed)


_TERMS = (_nothing, _band, _band, _lengths, _padding, _segments, _explicit)


def draw_bias(random, batch, N, T, S) -> np.ndarray:
    """[*#B #N #T #S] float32, -inf here and there."""
    shape = [1 if random.random() < 0.4 else n for n in (*batch, N, T, S)]
    bias = random.normal(size=shape)
    if random.random() < 0.4:
        bias = np.where(random.random(shape) < 0.2, -np.inf, bias)
    return bias.astype(np.float32)


def _poison(random, arrays, allowed, K) -> None:
    """NaN or Inf in keys and values, most of them where nobody may read."""
    *batch, N, _, S = allowed.shape
    read = allowed.reshape(*batch, K, N // K, -1, S).any((-3, -2))  # [*B K S]
    where = (
        ~np.moveaxis(read, -2, -1) if random.random() < 0.8 else random.random((*batch, S, K)) < 0.1
    )
    for name in ("k", "v"):
        if random.random() < 0.7:
            arrays[name][where] = random.choice([np.nan, np.inf, -np.inf])


def _form(random, mask, allowed):
    """The mask as it is, or the matrix that it stands for."""
    if mask is None or random.random() < 0.75:
        return mask
    return np.array(allowed)
