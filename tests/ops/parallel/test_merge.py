"""Attention over a memory in parts is attention over the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossattn as xa
from tests.closeness import close

B, T, S, N, K, H, Hv = 2, 3, 12, 4, 2, 8, 5


def inputs(dtype=np.float32, seed=0):
    draw = np.random.default_rng(seed).normal
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv)
    return tuple(jnp.asarray(draw(size=shape), dtype) for shape in shapes)


def readable(seed=0):
    """Queries that read some keys; the first of each example reads none at all."""
    allowed = np.random.default_rng(seed).random((B, 1, T, S)) < 0.4
    allowed[:, :, 0] = False
    return allowed


def part(q, k, v, allowed, start, stop):
    mask = xa.masks.explicit(allowed[..., start:stop])
    return xa.attend(q, k[:, start:stop], v[:, start:stop], mask, return_lse=True)


@functools.partial(jax.jit, static_argnums=4)
def in_parts(q, k, v, allowed, cuts):
    """Cut before these keys; with no cut, the whole."""
    ends = zip((0, *cuts), (*cuts, S), strict=True)
    parts = [part(q, k, v, allowed, *end) for end in ends]
    return functools.reduce(lambda a, b: xa.merge(*a, *b), parts)


def expected(parts):
    """The merge in float64 numpy, by the definition: lse = log sum exp lse_i."""
    outs = [np.float64(out) for out, _ in parts]
    weights = [np.exp(np.moveaxis(np.float64(lse), -1, -2))[..., None] for _, lse in parts]
    total = sum(weights)
    with np.errstate(all="ignore"):
        mean = sum(w * out for w, out in zip(weights, outs, strict=True)) / total
        return np.where(total > 0, mean, 0), np.moveaxis(np.log(total[..., 0]), -1, -2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("cuts", [(1,), (3, 4, 9)], ids=str)
def test_parts_of_a_memory_merge_to_the_whole(cuts, dtype):
    q, k, v = inputs(dtype)
    out, lse = in_parts(q, k, v, readable(), cuts)
    whole, whole_lse = in_parts(q, k, v, readable(), ())
    assert out.dtype == dtype and lse.dtype == jnp.float32
    # In bfloat16 each part is rounded, and each merge.
    close(out, whole, ulps=200 if dtype == jnp.float32 else 4)
    close(lse, whole_lse)
    assert not out[:, 0].any() and np.all(np.isneginf(lse[:, :, 0]))


def test_gradients_are_those_of_the_whole_and_zero_where_nothing_is_read():
    arrays = inputs()
    ct_out, ct_lse = np.random.default_rng(1).normal(size=(B, T, N, Hv)), np.ones((B, N, T))

    def loss(arrays, cuts):
        out, lse = in_parts(*arrays, readable(), cuts)
        return jnp.sum(out * ct_out) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse) * ct_lse)

    found = jax.grad(loss)(arrays, (5,))
    for name, mine, one in zip("qkv", found, jax.grad(loss)(arrays, ()), strict=True):
        close(mine, one, err_msg=name)
    assert not found[0][:, 0].any(), "a query that reads nothing has a gradient"


def test_parts_that_all_read_nothing_have_gradient_zero_not_nan():
    out, lse = jnp.zeros((1, T, N, Hv)), jnp.full((1, N, T), -jnp.inf)

    @jax.jit
    def merged_and_pulled(*parts):
        merged, pull = jax.vjp(xa.merge, *parts)
        return merged, pull((jnp.ones_like(out), jnp.ones_like(lse)))

    merged, gradients = merged_and_pulled(out, lse, out, lse)
    assert not merged[0].any() and np.all(np.isneginf(merged[1]))
    assert all(not x.any() for x in gradients)


def arbitrary(seed, empty=0.3):
    """A part that no attend made: any output, log-sum-exps far apart, some of nothing."""
    draw = np.random.default_rng(seed)
    lse = np.where(draw.random((1, N, T)) < empty, -np.inf, draw.normal(0, 30, (1, N, T)))
    out = draw.normal(size=(1, T, N, Hv)) * np.moveaxis(lse > -np.inf, -1, -2)[..., None]
    return jnp.float32(out), jnp.float32(lse)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 2**31), min_size=3, max_size=3))
def test_merging_is_commutative_associative_and_the_definition(seeds):
    a, b, c = parts = [arbitrary(seed) for seed in seeds]
    merge = jax.jit(xa.merge)
    ways = [
        merge(*merge(*a, *b), *c),
        merge(*a, *merge(*b, *c)),
        merge(*c, *merge(*b, *a)),
    ]
    for out, lse in ways:
        np.testing.assert_allclose(out, expected(parts)[0], atol=3e-5)
        np.testing.assert_allclose(lse, expected(parts)[1], rtol=1e-6, atol=1e-5)


def test_many_parts_merge_in_a_scan_and_in_an_associative_scan():
    parts = [arbitrary(seed) for seed in range(5)]
    outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
    one_by_one, _ = jax.lax.scan(
        lambda carry, x: (xa.merge(*carry, *x), None), parts[0], (outs[1:], lses[1:])
    )
    scan = functools.partial(jax.lax.associative_scan, lambda a, b: xa.merge(*a, *b))
    prefixes = jax.jit(scan)((outs, lses))
    for out, lse in (one_by_one, (prefixes[0][-1], prefixes[1][-1])):
        np.testing.assert_allclose(out, expected(parts)[0], atol=3e-5)
        np.testing.assert_allclose(lse, expected(parts)[1], rtol=1e-6, atol=1e-5)


def test_a_nan_that_a_part_read_stays():
    out, lse = arbitrary(1, empty=0)
    merged, merged_lse = xa.merge(out, lse, out * jnp.nan, lse * jnp.nan)
    assert np.isnan(merged).all() and np.isnan(merged_lse).all()


def test_a_part_of_another_shape_is_named(in_production):
    out, lse = arbitrary(0)
    with pytest.raises(ValueError, match=r"lse2 has shape \(1, 3, 4\); expected \(1, 4, 3\)"):
        xa.merge(out, lse, out, jnp.swapaxes(lse, -1, -2))
    with pytest.raises(ValueError, match="out2 has shape"):
        xa.merge(out, lse, out[..., :1], lse)
