"""Attention in float64 numpy, one query at a time: what every backend is held to.

A key that a query may not read is left out of that query's arrays, so what is masked does not
exist here by construction, and a query that may read nothing keeps the zeros it started with.
"""

import math
from typing import Any

import numpy as np


def attention(q, k, v, allowed=None, bias=None, scale=None, softcap=None):
    """Computes outputs [*B T N Hv], weights [*B N T S] and log-sum-exp [*B N T].

    q is [*B T N H], k [*B S K H], v [*B S K Hv].
    """
    q, k, v = float64(q), float64(k), float64(v)
    *batch, queries, heads, _ = q.shape
    out = np.zeros((*batch, queries, heads, v.shape[-1]))
    weights = np.zeros((*batch, heads, queries, k.shape[-3]))
    lse = np.full(weights.shape[:-1], -np.inf)
    bias, allowed = _dense(weights.shape, bias, allowed)
    for *b, n, t in np.ndindex(weights.shape[:-1]):
        b, kv = tuple(b), n // (heads // k.shape[-2])
        may = allowed[b][n, t]
        if may.any():
            row, lse[b][n, t], _ = _row(
                q[b][t, n], k[b][may, kv], bias[b][n, t, may], scale, softcap
            )
            weights[b][n, t, may] = row
            out[b][t, n] = np.einsum("s,sh->h", row, v[b][may, kv])
    return out, weights, lse


def gradients(cotangent, q, k, v, allowed=None, bias=None, scale=None, softcap=None, d_lse=None):
    """Computes gradients of sum(cotangent * output) + sum(d_lse * log-sum-exp), for what may be read.

    A dict with q, k, v and, when one is given, bias.
    """
    q, k, v, cotangent = float64(q), float64(k), float64(v), float64(cotangent)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    *batch, queries, heads, _ = q.shape
    dbias = np.zeros((*batch, heads, queries, k.shape[-3]))
    d_lse = np.zeros(dbias.shape[:-1]) if d_lse is None else d_lse
    dense_bias, allowed = _dense(dbias.shape, bias, allowed)
    factor = _scale(scale, q)
    for *b, n, t in np.ndindex(dbias.shape[:-1]):
        b, kv = tuple(b), n // (heads // k.shape[-2])
        may = allowed[b][n, t]
        if not may.any():
            continue
        query, keys, values, dout = q[b][t, n], k[b][may, kv], v[b][may, kv], cotangent[b][t, n]
        weights, _, slope = _row(query, keys, dense_bias[b][n, t, may], scale, softcap)
        dweights = np.einsum("h,sh->s", dout, values)
        dlogits = weights * (dweights - np.sum(weights * dweights) + d_lse[b][n, t])
        dscores = factor * slope * dlogits
        dq[b][t, n] += np.einsum("s,sh->h", dscores, keys)
        dk[b][may, kv] += np.outer(dscores, query)
        dv[b][may, kv] += np.outer(weights, dout)
        dbias[b][n, t, may] = dlogits
    gradient = {"q": dq, "k": dk, "v": dv}
    return gradient if bias is None else {**gradient, "bias": sum_to_shape(dbias, np.shape(bias))}


def readable(shape, allowed=None, bias=None) -> Any:
    """Returns which query may read which key, Bool [*B N T S]; the -inf of a bias is a mask too."""
    return _dense(shape, bias, allowed)[1]


def sum_to_shape(array, shape):
    """Sums over the axes that broadcasting made, the adjoint of np.broadcast_to."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and array.shape[i] != 1)
    return array.sum(axis=stretched, keepdims=True)


def _row(query, keys, bias, scale, softcap):
    """Computes weights, log-sum-exp and d(capped logits)/d(logits) of one query over readable keys."""
    logits = np.array([np.sum(query * key) for key in keys]) * _scale(scale, query)
    slope = np.ones_like(logits)
    if softcap is not None:
        slope = 1 - np.tanh(logits / softcap) ** 2
        logits = softcap * np.tanh(logits / softcap)
    logits = logits + bias
    exponentials = np.exp(logits - logits.max())
    total = exponentials.sum()
    return exponentials / total, logits.max() + np.log(total), slope


def _dense(shape, bias, allowed):
    bias = np.zeros(shape) if bias is None else np.broadcast_to(float64(bias), shape)
    allowed = np.ones(shape, bool) if allowed is None else np.broadcast_to(allowed, shape)
    return bias, allowed & (bias > -np.inf)


def _scale(scale, q):
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def float64(x) -> Any:
    """Returns any array as numpy's float64."""
    return np.asarray(x).astype(np.float64)
