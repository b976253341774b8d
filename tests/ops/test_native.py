"""The compiled CPU kernel where one block is not enough, and what happens where it cannot be built.

The conformance suite holds it to the oracle in small shapes; here the reference is the oracle.
"""

import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from tests.closeness import close
from tests.compiled_kernel import needs_kernel
from tests.conftest import with_devices

RANDOM = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def operands(B, T, S, N, K, H, Hv):
    return array(B, T, N, H), array(B, S, K, H), array(B, S, K, Hv)


def both(q, k, v, mask):
    """(output, log-sum-exp, gradients) of the kernel and of the reference, compiled as one program."""
    cotangents = array(*q.shape[:-1], v.shape[-1]), array(q.shape[0], q.shape[2], q.shape[1])

    def run(backend, *qkv):
        def attend(*qkv):
            out, lse = xa.attend(*qkv, mask, backend=backend, return_lse=True)
            return out, jnp.where(lse == -jnp.inf, 0, lse)

        results, pull = jax.vjp(attend, *qkv)
        return *results, *pull(cotangents)

    return jax.jit(lambda *qkv: [run(backend, *qkv) for backend in ("cpu", "reference")])(q, k, v)


SHAPES = {
    "one_block": (2, 64, 64, 4, 4, 64, 64),
    "several_blocks": (1, 200, 300, 2, 2, 32, 32),
    "odd_everything": (2, 67, 131, 6, 2, 20, 9),
    "few_queries": (3, 2, 150, 4, 2, 24, 40),
    "one_query_wide_head": (2, 1, 33, 2, 1, 130, 70),
    "one_key": (1, 70, 1, 2, 2, 8, 8),
}


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ["all", "causal", "lengths", "explicit"])
def test_blocks_of_any_shape_add_up_to_the_reference(shape, kind):
    B, T, S, N, *_ = shape
    masks = {
        "all": None,
        "causal": xa.masks.causal(offset=S // 3),
        "lengths": xa.masks.lengths(jnp.arange(B) * (S // 2)),  # the first row reads nothing
        "explicit": xa.masks.explicit(jnp.asarray(RANDOM.random((B, N, T, S)) < 0.3)),
    }
    close(*both(*operands(*shape), masks[kind]))


@needs_kernel
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("T", [1, 150])
def test_poison_in_a_later_block_reaches_only_who_may_read_it(bad, T):
    q, k, v = operands(1, T, 300, 2, 2, 16, 16)
    odd = jnp.arange(T)[:, None] % 2 == 1
    mask = xa.masks.explicit((odd | (jnp.arange(300) != 290))[None, None])
    clean = xa.attend(q, k, v, mask, backend="cpu")
    for spoilt in ((k.at[0, 290, 0].set(bad), v), (k, v.at[0, 290, 1].set(bad))):
        out = np.asarray(xa.attend(q, *spoilt, mask, backend="cpu"))
        np.testing.assert_array_equal(out[:, ::2], clean[:, ::2])
        assert np.isnan(out[:, 1::2]).any(-1).any(-1).all()
        gradient = jax.grad(
            lambda q, kv=spoilt: xa.attend(q, *kv, mask, backend="cpu")[:, ::2].sum()
        )(q)
        assert np.isfinite(gradient[:, ::2]).all()


@pytest.mark.slow
@needs_kernel
def test_vmap_over_some_operands_equals_a_loop():
    q, k, v = array(3, 2, 70, 2, 16), array(2, 40, 2, 16), array(3, 2, 40, 2, 16)
    mask = xa.masks.lengths(jnp.array([10, 40]))

    def one(q, v):
        return xa.attend(q, k, v, mask, backend="cpu")

    def loss(function, q, v):
        return (function(q, v) ** 2).sum()

    def loop(q, v):
        return jnp.stack([one(*x) for x in zip(q, v, strict=True)])

    mapped = jax.vmap(one)
    close(mapped(q, v), loop(q, v))
    found, expected = (jax.grad(loss, argnums=(1, 2))(f, q, v) for f in (mapped, loop))
    close(found, expected)


@needs_kernel
def test_results_do_not_depend_on_the_run():
    q, k, v = operands(4, 130, 130, 4, 2, 32, 32)
    step = jax.jit(jax.grad(lambda q, k, v: xa.attend(q, k, v).sum(), argnums=(0, 1, 2)))
    first = step(q, k, v)
    for _ in range(5):
        for x, y in zip(first, step(q, k, v), strict=True):
            np.testing.assert_array_equal(x, y)


PROGRAM = """
import jax.numpy as jnp, crossattn as xa
x = jnp.ones((1, 3, 2, 4))
print(xa.attend(x, x, x).shape)
try:
    xa.attend(x, x, x, backend="cpu")
except NotImplementedError as reason:
    print("refused:", reason)
"""


def run(**environment):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**with_devices(1), "CROSSATTN_NATIVE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"CROSSATTN_NATIVE": "0"}, "CROSSATTN_NATIVE=0"),
        ({"PATH": "{tmp}/none"}, "no C++ compiler"),
        ({"PATH": "{tmp}:/bin:/usr/bin"}, "could not build it: unknown option"),
    ],
    ids=["turned off", "no compiler", "a compiler that fails"],
)
def test_without_the_kernel_the_reference_takes_over(tmp_path, environment, said):
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho 'unknown option' >&2\nexit 1\n")
    fake.chmod(0o755)
    given = {name: value.format(tmp=tmp_path) for name, value in environment.items()}
    out = run(XDG_CACHE_HOME=str(tmp_path / "cache"), **given)
    assert "(1, 3, 2, 4)" in out
    assert "refused" in out and said in out
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.slow
@needs_kernel
def test_it_is_built_once_into_the_cache(tmp_path):
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    counting, calls = tmp_path / "c++", tmp_path / "calls"
    # Building quickly what is not timed here.
    counting.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {compiler} "$@" -O0\n')
    counting.chmod(0o755)
    for _ in range(2):
        out = run(PATH=f"{tmp_path}:{os.environ['PATH']}", XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert "refused" not in out
    assert calls.read_text().count("-shared ") == 1
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1


def packed(B, T, S, lengths):
    """Segments of these lengths one after the other, padding behind, rolled along in each row."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    q, k = np.zeros((B, T), int), np.zeros((B, S), int)
    q[:, : len(ids)], k[:, : len(ids)] = ids[:T], ids[:S]
    return xa.masks.segments(q, k)


LONG = {
    "causal": xa.masks.causal(),
    "window": xa.masks.window(40, 3),
    "window_to_the_right": xa.masks.window(0, None),
    "packed": packed(1, 1200, 1200, [500, 30, 1, 400, 200]),
    "packed_causal": packed(1, 1200, 1200, [333, 600]) & xa.masks.causal(),
    "queries_cut_short": xa.masks.lengths(700, 650),
    "padding": xa.masks.key_padding(RANDOM.random((1, 1200)) < 0.5),
    "positions_back_to_front": xa.masks.causal(
        q_positions=np.arange(1200)[::-1].copy(), k_positions=np.arange(1200)[::-1].copy()
    ),
    "either": xa.masks.window(3, 3) | xa.masks.lengths(40),
}


@pytest.mark.quick(4)
@needs_kernel
@pytest.mark.parametrize("name", LONG)
def test_a_long_head_in_parts_is_the_references(name):
    close(*both(*operands(1, 1200, 1200, 2, 1, 16, 8), LONG[name]))


@needs_kernel
@pytest.mark.parametrize("shared", [1, 5], ids=["one_slot_a_position", "most_slots"])
def test_queries_that_share_slots_as_beams_do_read_what_the_mask_says(shared):
    B, J, S, filled = 3, 6, 300, 197
    q, k, v = operands(B, J, S, 4, 2, 24, 40)
    beams = (np.arange(S) + RANDOM.integers(0, J, (B, 1, 1, S))) % J
    allowed = (beams - np.arange(J)[:, None]) % J < shared
    mask = xa.masks.lengths(filled) & xa.masks.explicit(allowed)
    k, v = (x.at[:, filled:].set(np.nan) for x in (k, v))
    close(*both(q, k, v, mask))


@pytest.mark.quick(1)
@needs_kernel
@pytest.mark.parametrize("t", [0, 3, 41, 149])
def test_one_query_of_a_cache_reads_what_masks_of_all_kinds_say(t):
    S = 150
    q, k, v = operands(2, 1, S, 4, 2, 70, 36)
    masks = {
        "window": xa.masks.window(21, 0, offset=t),
        "filled": xa.masks.causal(offset=t) & xa.masks.lengths(np.array([t + 1, 2])),
        "padding": xa.masks.causal(offset=t) & xa.masks.key_padding(RANDOM.random((2, S)) < 0.5),
        "segments": xa.masks.segments(np.array([[2], [0]]), RANDOM.integers(0, 3, (2, S))),
        "matrix": xa.masks.explicit(RANDOM.random((2, 1, 1, S)) < 0.5),
    }
    for mask in masks.values():
        read = np.broadcast_to(mask.materialize(1, S), (2, 1, 1, S)).reshape(2, S, 1, 1)
        poisoned = [jnp.where(read, x, np.nan) for x in (k, v)]
        close(*both(q, *poisoned, mask))


@needs_kernel
def test_masks_that_can_be_said_in_little_reach_the_kernel_as_little():
    T = 4096
    q, k, v = (jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32) for _ in range(3))
    mask = packed(1, T, T, [3000, 1000]) & xa.masks.causal() & xa.masks.lengths(np.array([4000]))
    step = jax.jit(jax.grad(lambda q, k, v: xa.attend(q, k, v, mask, backend="cpu").sum()))
    taken = step.lower(q, k, v).compile().memory_analysis().temp_size_in_bytes
    assert taken < 400 * T  # a matrix of bytes would be 4096 T
