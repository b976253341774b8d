"""JAX's kernels for TPUs keep attend's promises, in Pallas's interpret mode, and fit a TPU core's memory."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import crossattn as xa
from crossattn import testing
from crossattn.ops import backends, platforms, tpu
from crossattn.ops.call import Call
from crossattn.testing.case import array

m = xa.masks
CASES = testing.cases()


def later(*parameters):
    """Marks parameters as slow: the interpreter takes seconds for each."""
    return [pytest.param(*each, marks=pytest.mark.slow) for each in parameters]


@pytest.fixture(autouse=True)
def _without_a_tpu(monkeypatch):
    """Kernels are interpreted, wherever they are made, and made as for one TPU."""
    real = pallas.pallas_call

    def interpreted(*arguments, **options):
        return real(*arguments, **{**options, "interpret": True})

    monkeypatch.setattr(pallas, "pallas_call", interpreted)
    monkeypatch.setitem(platforms._ALIASES, "cpu", "tpu")
    with platforms.lowered_for(platforms.Target("tpu", True)):
        yield


def reusing(name):
    """``attend`` by a backend whose backward pass gets what a call before it found."""

    def attend(q, k, v, mask=None, *, bias=None, scale=None):
        mask = None if mask is None else m.as_mask(mask, q.ndim)
        call = Call(q, k, v, mask, bias, q.shape[-1] ** -0.5 if scale is None else scale)
        with_rows = dataclasses.replace(call, return_rows=True)
        found = jax.lax.stop_gradient(backends.run(name, with_rows))
        return backends.run(name, dataclasses.replace(call, known=(found.out, *found.rows))).out

    return attend


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("splash", "causal_and_padding"),
        ("splash", "nan_in_future_v"),
        ("flash_tpu", "bias_and_mask"),
        *later(
            ("splash", "window"),
            ("splash", "causal_or_prefix"),
            ("splash", "causal_before_every_key"),
            ("splash", "causal_by_positions"),
            ("splash", "float16_logits_beyond_its_range"),
            ("flash_tpu", "bias_1x4x1x1"),
            ("flash_tpu", "bias_2x1x1x7"),
            ("flash_tpu", "segments_and_either"),
            ("flash_tpu", "nan_in_future_v"),
        ),
    ],
)
def test_kernels_keep_the_promises(backend, name):
    testing.check(functools.partial(xa.attend, backend=backend), CASES[name])


LSE = [
    ("splash", "causal_and_padding"),
    ("splash", "causal_or_prefix"),
    ("flash_tpu", "bias_2x4x5x7"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("backend", "name"), LSE)
def test_the_log_sum_exp_and_its_gradient_are_the_oracles(backend, name):
    testing.check_lse(functools.partial(xa.attend, backend=backend), CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name"), [("splash", "some_rows_read_nothing"), ("flash_tpu", "bias_and_mask")]
)
def test_a_backward_pass_that_is_told_what_was_found_gives_the_same(backend, name):
    testing.check(reusing(backend), CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name"), [("flash_tpu", "bias_1x1x5x1"), ("splash", "mask_2x4x5x7")]
)
def test_examples_in_parts_sum_the_gradient_of_a_shared_bias(backend, name, monkeypatch):
    monkeypatch.setattr(tpu, "_HELD", 1)
    testing.check(functools.partial(xa.attend, backend=backend), CASES[name])


@pytest.mark.parametrize("mask", ["window", *later(["prefix"], ["matrix"])])
def test_blocks_that_are_left_out_or_partly_hidden_change_nothing(mask, monkeypatch):
    """Lengths of several blocks, two of them where nothing is read."""
    T, S = 300, 520
    arrays = tuple(
        jnp.asarray(array(name, 2, n, 1, 8)) for name, n in (("q", T), ("k", S), ("v", S))
    )
    chosen = {
        "window": m.window(40, offset=-200),
        "prefix": m.window(30, 9, offset=jnp.array([-150, 170])),
        "matrix": m.explicit((np.arange(S) // 130 == np.arange(T)[:, None] // 150)[None, None]),
    }[mask]
    monkeypatch.setattr(tpu, "_WIDEST", 128)

    def loss(backend, arrays):
        q, k, v = arrays
        out = xa.attend(q, k, v, chosen, backend=backend)
        return jnp.sum(out * array("cotangent", *out.shape)), out

    both = [
        jax.jit(jax.grad(functools.partial(loss, backend), has_aux=True))(arrays)
        for backend in ("splash", "reference")
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), *both)


def test_a_kernel_keeps_the_digits_of_float32_and_asks_no_more_of_bfloat16():
    """Whatever the caller's setting: Mosaic cannot compile "highest" for bfloat16."""

    def precisions(dtype, backend):
        def loss(q):
            return xa.attend(q, q, q, backend=backend, scale=1.0).astype(float).sum()

        with jax.default_matmul_precision("highest"):
            text = jax.jit(jax.grad(loss)).lower(jnp.zeros((1, 128, 1, 128), dtype)).as_text()
        return re.findall(r"stablehlo.dot_general .*?precision = \[(\w*)", text)

    for backend in ("splash", "flash_tpu"):
        wide, narrow = precisions(jnp.float32, backend), precisions(jnp.bfloat16, backend)
        assert len(wide) == len(narrow) >= 8, "two products forward and six back"
        assert all("HIGHEST" in found for found in wide)
        assert not any("HIGHEST" in found for found in narrow)


@pytest.mark.parametrize("size", [64, 128, 256, 512, 1024])
def test_blocks_shrink_as_heads_grow(size):
    found = tpu.blocks(50176, 50176, size, size, jnp.bfloat16, exact=False)
    assert all(50176 % n == 0 and n % 128 == 0 for block in found for n in block)
    widest = [rows * columns for rows, columns in found]
    assert widest == [512 * 512] * 3 if size <= 512 else max(widest) < 512 * 512


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("splash", {"bias": jnp.zeros((1, 1, 4, 4))}, "no bias"),
        ("splash", {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "no dropout"),
        ("splash", {"softcap": jnp.float32(3)}, "a plain number"),
        ("splash", {"return_weights": True}, "never has the weights"),
        ("flash_tpu", {"softcap": 3.0}, "no softcap"),
        ("flash_tpu", {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "no dropout"),
        ("flash_tpu", {"return_weights": True}, "never has the weights"),
        ("splash", {"size": 8192}, "size 8192 in float32 do not fit"),
        ("flash_tpu", {"size": 8192}, "size 8192 in float32 do not fit"),
    ],
)
def test_what_a_kernel_does_not_take_it_refuses_with_the_reason(backend, options, reason):
    size = options.get("size", 8)
    q, options = jnp.zeros((1, 4, 1, size)), {k: x for k, x in options.items() if k != "size"}
    with pytest.raises(NotImplementedError, match=reason):
        xa.attend(q, q, q, backend=backend, **options)
