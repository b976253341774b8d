"""Attention, its modules and its statistics on one device, under any mask: held to float64 numpy."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import crossattn as xa
from crossattn import testing
from crossattn.testing import Broken, Case, checks, oracle
from experiments.fuzz import Wrong
from experiments.fuzz.problems import describe, draw_mask, explicit, problem

ABOUT = "masks, modules, statistics and memories on one device, against float64 numpy"
NEEDS = ()
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
BACKENDS = (None, "cpu", "chunked", "reference", "jax_nn")


def start(folder: Path) -> Callable[[np.random.Generator], None]:
    """One of the kinds below, at random."""
    return lambda random: _KINDS[random.integers(len(_KINDS))](random)


def attend(random) -> None:
    """Output and gradients of every backend."""
    case, backend = problem(random), BACKENDS[random.integers(len(BACKENDS))]
    with _said(f"attend by {backend} of {case}"):
        try:
            testing.check(functools.partial(xa.attend, backend=backend), case)
        except NotImplementedError as refusal:
            if backend in (None, "reference"):
                raise Wrong(f"attend by {backend} of {case} is refused: {refusal}") from refusal


def parts_of_attend(random) -> None:
    """Weights and log-sum-exp."""
    case = problem(random)
    check = [testing.check_weights, testing.check_lse][random.integers(2)]
    with _said(f"{check.__name__} of {case}"):
        check(xa.attend, case)


def statistics(random) -> None:
    """Entropy, maximum, mean position and mass, from the oracle's weights."""
    case = _finite(problem(random, dtype=np.float32))
    measured = jax.jit(
        lambda q, k: xa.attention_stats(q, k, case.mask, bias=case.bias, **case.options)
    )
    stats = measured(case.q, case.k)
    w, reads = case.expected[1], case.readable.any(-1)
    expected = {
        "entropy": -np.sum(w * np.log(np.where(w > 0, w, 1)), -1),
        "maximum": w.max(-1),
        "expected": np.sum(w * np.arange(w.shape[-1]), -1),
        "mass": w.sum(-2),
    }
    with _said(f"attention_stats of {case}"):
        for name, value in expected.items():
            checks.close(getattr(stats, name), value, name, ulps=4)
        checks.expect(
            np.all(np.asarray(stats.lse)[~reads] == -np.inf), "the log-sum-exp of nothing"
        )
        checks.close(np.asarray(stats.lse)[reads], case.expected[2][reads], "log-sum-exp")


def merged(random) -> None:
    """Any cut of the keys, merged in any order."""
    case = _finite(problem(random, dtype=np.float32))
    S = case.k.shape[-3]
    cuts = np.sort(random.integers(0, S + 1, random.integers(1, 4)))
    pieces = [s for s in np.split(np.arange(S), cuts) if len(s)]
    allowed, parts = np.broadcast_to(case.readable, case.weights_shape), []
    for piece in pieces:
        bias = None
        if case.bias is not None:
            bias = np.broadcast_to(case.bias, case.weights_shape)[..., piece]
        keys, values = case.k[..., piece, :, :], case.v[..., piece, :, :]
        mask = explicit(jnp.asarray(allowed[..., piece]))
        parts.append(
            xa.attend(case.q, keys, values, mask, bias=bias, return_lse=True, **case.options)
        )
    order = random.permutation(len(parts))
    out, lse = functools.reduce(lambda a, b: xa.merge(*a, *b), [parts[i] for i in order])
    with _said(f"merge of {len(parts)} parts of {case}"):
        checks.close(out, case.expected[0], "output", ulps=2)
        reads = case.readable.any(-1)
        checks.close(np.asarray(lse)[reads], case.expected[2][reads], "log-sum-exp")
        checks.zero(np.asarray(out)[case.reads_nothing], "the output of a query that reads nothing")


def module(random) -> None:
    """MultiHeadAttention: projections, attention, projection."""
    B, T, S = random.choice([1, 2, 3, 4, 7], 3).tolist()
    K, H, D = int(random.integers(1, 4)), int(random.choice([2, 4, 8])), 8
    N = K * int(random.integers(1, 4))
    options: Any = {"softcap": 3.0} if random.random() < 0.2 else {}
    biased = bool(random.integers(2))
    build = lambda rngs: xa.nn.MultiHeadAttention(  # noqa: E731
        D,
        N,
        head_dim=H,
        num_kv_heads=K,
        use_bias=biased,
        rngs=rngs,
        **options,
    )
    seed = int(random.integers(10**6))
    made = xa.init(build, jax.random.key(seed))
    params = jax.tree.map(lambda x: np.float32(random.normal(size=x.shape) / 2), made)
    batch = (B,) if random.random() < 0.8 else ()
    x, memory = (np.float32(random.normal(size=(*batch, n, D))) for n in (T, S))
    mask, allowed = draw_mask(random, batch, N, T, S)
    given = mask
    if mask is not None and random.random() < 0.4:
        given = jnp.asarray(np.broadcast_to(allowed, (*batch, N, T, S)))
    q, k, v = (
        _projected(params[n], y)
        for n, y in zip(("query", "key", "value"), (x, memory, memory), strict=True)
    )
    mixed = oracle.attention(q, k, v, np.broadcast_to(allowed, (*batch, N, T, S)), **options)[0]
    expected = np.einsum("...tnh,nhd->...td", mixed, np.float64(params["out"]["kernel"]))
    expected = expected + np.float64(params["out"].get("bias", 0))
    with _said(f"MultiHeadAttention x{list(x.shape)} memory {S} N{N} K{K} {describe(mask)}"):
        out = xa.apply(build, params, x, memory, given)
        checks.close(out, expected, "output", ulps=4)


def cached(random) -> None:
    """A cache that grows piece by piece gives what the whole gives at once, rotary positions included."""
    B, T, D, N = int(random.integers(1, 4)), int(random.integers(1, 12)), 8, 2
    rope = 10_000.0 if random.random() < 0.6 else None
    build = lambda rngs: xa.nn.MultiHeadAttention(D, N, rope_base=rope, rngs=rngs)  # noqa: E731
    params = xa.init(build, jax.random.key(int(random.integers(10**6))))
    attention = xa.functional.bind(build, params)
    x = jnp.asarray(random.normal(size=(B, T, D)), jnp.float32)
    whole = attention(x, mask=xa.masks.causal())
    cache, outs, at = attention.cache((B,), T + int(random.integers(0, 3))), [], 0
    cuts = np.sort(random.integers(0, T + 1, random.integers(1, 4)))
    for piece in (p for p in np.split(np.arange(T), cuts) if len(p)):
        part = x[:, piece]
        cache = attention.extend(cache, part)
        outs.append(attention(part, cache, xa.masks.causal(offset=at)))
        at += len(piece)
    with _said(f"a cache grown in {len(outs)} pieces, {'rotary' if rope else 'no'} positions"):
        checks.close(jnp.concatenate(outs, 1), whole, "output", ulps=4)


def memories(random) -> None:
    """Concatenated, grown and taken memories are read like the arrays they were made from."""
    case = _finite(problem(random, batch=(int(random.integers(1, 4)),), dtype=np.float32))
    B, S, K, H = case.k.shape
    valid = random.random((B, S)) < 0.7
    cut = int(random.integers(0, S + 1))
    halves = [
        xa.Memory(jnp.asarray(case.k[:, s]), jnp.asarray(case.v[:, s]), jnp.asarray(valid[:, s]))
        for s in (slice(0, cut), slice(cut, S))
    ]
    if random.random() < 0.5:
        memory = xa.Memory.concat(*halves)
    else:
        memory = xa.Memory.empty((B,), S + 2, K, H, case.v.shape[-1])
        for half in (half for half in halves if half.size):
            memory = memory.append(half.keys, half.values, half.valid)
    order = random.permutation(B)
    memory = memory.take(jnp.asarray(order))
    out = xa.attend(case.q[order], memory.keys, memory.values, memory.mask())
    arrays: Any = [x[order] for x in (case.q, case.k, case.v)]
    expected = oracle.attention(*arrays, allowed=valid[order][:, None, None])[0]
    with _said(f"a memory of k{list(case.k.shape)} cut at {cut}"):
        checks.close(out, expected, "output")


def ambiguous(random) -> None:
    """A matrix of three axes means two things where there is a batch: refused by name, everywhere."""
    B, N, T, S = (int(random.integers(1, 4)) for _ in range(4))
    B = max(B, 2)  # [1 T S] means one thing
    N = B if random.random() < 0.5 else N
    allowed = jnp.asarray(random.random((B, T, S)) < 0.5)
    build = lambda rngs: xa.nn.MultiHeadAttention(4 * N, N, rngs=rngs)  # noqa: E731
    params = xa.init(build, jax.random.key(0))
    x, memory = (jnp.ones((B, n, 4 * N)) for n in (T, S))
    q, k = (jnp.ones((B, n, N, 4)) for n in (T, S))
    calls = {
        "attend": lambda: xa.attend(q, k, k, allowed),
        "attend of masks.explicit": lambda: xa.attend(q, k, k, xa.masks.explicit(allowed)),
        "attend of mask & array": lambda: xa.attend(q, k, k, xa.masks.causal() & allowed),
        "MultiHeadAttention": lambda: xa.apply(build, params, x, memory, allowed),
        "attention_stats": lambda: xa.attention_stats(q, k, allowed),
    }
    name = list(calls)[random.integers(len(calls))]
    try:
        calls[name]()
    except ValueError as error:
        if "mask" not in str(error):
            raise Wrong(f"{name} refuses a mask of three axes without naming it: {error}") from None
    else:
        raise Wrong(f"{name} takes a mask of three axes, [B T S] or [N T S]")


def latents(random) -> None:
    """Queries without the memory's batch axes: read by each row, or refused."""
    B, T, S, D = (int(n) for n in (*random.integers(1, 4, 3), 8))
    build = lambda rngs: xa.nn.MultiHeadAttention(D, 2, rngs=rngs)  # noqa: E731
    attention = xa.functional.bind(build, xa.init(build, jax.random.key(0)))
    x, memory = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((T, D), (B, S, D)))
    expected = jnp.stack([attention(x, row) for row in memory])
    try:
        out = attention(x, attention.memory(memory))
    except ValueError:
        return
    with _said("latents without batch axes that read a memory with them"):
        checks.close(out, expected, "output")


_KINDS = (attend,) * 6 + (parts_of_attend,) * 2 + (
    statistics, merged, module, module, cached, memories, ambiguous, latents,
)  # fmt: skip


class _said:
    """Says of which call a promise is broken; digits of shapes stay, for they are the reproduction."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Broken):
            raise Wrong(f"{self.what}: {error}") from error


def _finite(case: Case) -> Case:
    """Without NaN and Inf in what is read."""
    for array in (case.q, case.k, case.v):
        array[~np.isfinite(array)] = 0
    return case


def _projected(p: Any, x: Any) -> np.ndarray:
    out = np.einsum("...td,dnh->...tnh", np.float64(x), np.float64(p["kernel"]))
    return out + np.float64(p["bias"]) if "bias" in p else out
