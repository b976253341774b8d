"""Derivatives in forward mode and of higher order, against differences of float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import transformer
from crossattn.ops import product
from crossattn.testing import oracle
from crossattn.testing.case import array
from tests.compiled_kernel import needs_kernel

KERNELS = [pytest.param("cpu", marks=needs_kernel), "chunked"]
B, T, S, N, K, H = 2, 9, 11, 4, 2, 8
SHAPES = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, H)}
POINT = tuple(array(name, *shape) for name, shape in SHAPES.items())
WAY = tuple(array(f"along_{name}", *shape) for name, shape in SHAPES.items())
LENGTHS = np.array([S, 5])
# The first queries of a negative offset read nothing.
MASK = xa.masks.causal(offset=-2) & xa.masks.lengths(LENGTHS)
INDEX, KEYS = np.arange(T)[:, None], np.arange(S)
ALLOWED = (KEYS <= INDEX - 2) & (KEYS < LENGTHS[:, None, None])
STEP = 1e-5


@pytest.fixture(params=KERNELS)
def backend(request):
    return request.param


def energy(backend, q, k, v):
    """A scalar of the output, with a gradient everywhere."""
    return jnp.sum(jnp.sin(xa.attend(q, k, v, MASK, backend=backend)))


def numpy_output(q, k, v):
    return oracle.attention(q, k, v, ALLOWED[:, None])[0]


def numpy_gradients(q, k, v):
    allowed = ALLOWED[:, None]
    found = oracle.gradients(np.cos(numpy_output(q, k, v)), q, k, v, allowed=allowed)
    return tuple(found[name] for name in "qkv")


def along(function):
    """The derivative of a function of q, k and v at POINT along WAY, by a central difference."""

    def at(sign):
        moved = (np.float64(x) + sign * STEP * d for x, d in zip(POINT, WAY, strict=True))
        return function(*moved)

    return jax.tree.map(lambda a, b: (a - b) / (2 * STEP), at(1), at(-1))


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(b).max()))


def gradients(backend):
    return jax.grad(functools.partial(energy, backend), (0, 1, 2))


def test_forward_mode_is_a_difference_of_outputs(backend):
    attend = functools.partial(xa.attend, mask=MASK, backend=backend)
    out, change = jax.jit(lambda: jax.jvp(attend, POINT, WAY))()
    close(out, numpy_output(*POINT))
    close(change, along(numpy_output))
    assert not np.any(np.asarray(change)[:, :2])  # of the queries that read nothing
    close(jax.linearize(attend, *POINT)[1](*WAY), change)


def forward_over_reverse(backend):
    return lambda *at: jax.jvp(gradients(backend), at, WAY)[1]


def reverse_over_forward(backend):
    slope = functools.partial(energy, backend)
    return jax.grad(lambda *at: jax.jvp(slope, at, WAY)[1], (0, 1, 2))


def reverse_over_reverse(backend):
    def slope(*at):
        return sum(jnp.vdot(x, d) for x, d in zip(gradients(backend)(*at), WAY, strict=True))

    return jax.grad(slope, (0, 1, 2))


@pytest.mark.parametrize(
    "product", [forward_over_reverse, reverse_over_forward, reverse_over_reverse]
)
def test_products_with_the_hessian_are_differences_of_gradients(backend, product):
    close(jax.jit(product(backend))(*POINT), along(numpy_gradients))


def through_layers(backend, q, k, v):
    """Two layers by ``scan``, recomputed in the backward pass, examples mapped over."""

    @jax.checkpoint
    def layer(x, _):
        one = functools.partial(xa.attend, mask=xa.masks.causal(2), backend=backend)
        return jax.vmap(one, (0, 0, None))(x, k, v[0]), None

    return jnp.sum(jnp.sin(jax.lax.scan(layer, q, None, length=2)[0]))


@pytest.mark.quick(2)
@pytest.mark.parametrize("outer", [jax.jvp, jax.vjp])
def test_second_orders_go_through_scan_remat_and_vmap(backend, outer):
    def twice(backend):
        slopes = jax.grad(functools.partial(through_layers, backend), (0, 1, 2))
        if outer is jax.jvp:
            return jax.jvp(slopes, POINT, WAY)[1]
        return jax.vjp(slopes, *POINT)[1](tuple(map(jnp.asarray, WAY)))

    close(jax.jit(twice, static_argnums=0)(backend), jax.jit(twice, static_argnums=0)("reference"))


def test_a_hessian_is_that_of_the_reference(backend):
    def of_scales(backend, scales):
        return energy(backend, *(s * x for s, x in zip(scales, POINT, strict=True)))

    found, expected = (
        jax.jit(jax.hessian(functools.partial(of_scales, which)))(jnp.array([1.0, 0.5, 2.0]))
        for which in (backend, "reference")
    )
    close(found, expected)


@needs_kernel
def test_reverse_mode_runs_the_kernels_alone():
    text = jax.jit(gradients("cpu")).lower(*POINT).as_text()
    assert text.count("@CrossattnForward") == text.count("@CrossattnBackward") == 1
    assert "dot_general" not in text


@needs_kernel
def test_the_product_of_few_rows_keeps_its_derivatives_in_a_loop():
    weights, x = array("weights", 128, 128) / 12, array("x", 16, 128)

    def loss(multiply, w):
        def layer(x, _):
            return jnp.tanh(multiply(x, w)), None

        return jnp.sum(jax.lax.scan(layer, jnp.asarray(x), None, length=2)[0] ** 2)

    def ours(x, w):
        return product.dot_general(x, w, (((1,), (0,)), ((), ())))

    found, expected = (
        jax.jvp(jax.grad(functools.partial(loss, one)), (weights,), (weights,))[1]
        for one in (ours, jnp.matmul)
    )
    close(found, expected)


@pytest.mark.slow
def test_a_whole_model_has_products_with_its_hessian():
    config = transformer.tiny(encoder_layers=1, decoder_layers=1)

    def build(rngs):
        return transformer.Transformer(config, rngs=rngs)

    params = xa.init(build, jax.random.key(0))
    tokens = jnp.arange(2 * 12).reshape(2, 12) % config.vocab_size

    def loss(params):
        return jnp.mean(jnp.square(xa.apply(build, params, tokens, tokens)))

    @jax.jit
    def twice(params):
        return jax.jvp(jax.grad(loss), (params,), (params,))[1]

    found = twice(params)
    with xa.use_backend("reference"):
        close(found, twice(params))
