"""Products of few rows: the compiled kernel against float64 numpy, and where it steps aside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.ops import product
from tests.closeness import close
from tests.compiled_kernel import needs_kernel

RANDOM = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def dims(left, right):
    return (left, right), ((), ())


CALLS = {
    "plain": ((32, 256), (256, 256), dims((1,), (0,))),
    "odd_sizes": ((17, 301), (301, 77), dims((1,), (0,))),
    "many_columns": ((12, 70), (70, 1031), dims((1,), (0,))),
    "one_row": ((1, 256), (256, 256), dims((1,), (0,))),
    "one_row_of_odd_sizes": ((1, 301), (301, 79), dims((1,), (0,))),
    "one_row_of_many_columns": ((1, 70), (70, 1031), dims((1,), (0,))),
    "one_row_for_several_threads": ((1, 1024), (1024, 1536), dims((1,), (0,))),
    "one_row_transposed": ((1, 256), (4099, 256), dims((1,), (1,))),
    "one_row_transposed_odd_sizes": ((1, 131), (205, 131), dims((1,), (1,))),
    "one_row_of_many_axes": ((1, 1, 8, 16), (8, 16, 192), dims((2, 3), (0, 1))),
    "transposed": ((32, 256), (800, 256), dims((1,), (1,))),
    "transposed_odd_sizes": ((13, 131), (205, 131), dims((1,), (1,))),
    "several_axes": ((4, 5, 8, 16), (8, 16, 192), dims((2, 3), (0, 1))),
    "several_outputs": ((4, 5, 128), (128, 8, 24), dims((2,), (0,))),
    "rows_of_many_axes": ((2, 3, 4, 200), (200, 100), dims((3,), (0,))),
}


def uses_kernel(x, w, dimensions, **options):
    made = jax.make_jaxpr(lambda x, w: product.dot_general(x, w, dimensions, **options))(x, w)
    return "CrossattnProduct" in str(made)


@needs_kernel
@pytest.mark.parametrize("name", CALLS)
def test_it_is_the_product(name):
    left, right, dimensions = CALLS[name]
    x, w = array(*left), array(*right)
    assert uses_kernel(x, w, dimensions)
    expected = np.tensordot(np.float64(x), np.float64(w), dimensions[0])
    for call in (product.dot_general, jax.jit(product.dot_general, static_argnums=2)):
        close(call(x, w, dimensions), expected, ulps=100)


@needs_kernel
@pytest.mark.parametrize(
    "name", ["odd_sizes", "transposed_odd_sizes", "several_axes", "one_row", "one_row_transposed"]
)
def test_its_derivatives_are_those_of_lax(name):
    left, right, dimensions = CALLS[name]
    primals, tangents = (array(*left), array(*right)), (array(*left), array(*right))
    found, expected = (
        (jax.jvp(f, primals, tangents), jax.vjp(f, *primals)[1](f(*tangents)))
        for f in (
            lambda x, w: product.dot_general(x, w, dimensions),
            lambda x, w: jax.lax.dot_general(x, w, dimensions),
        )
    )
    close(found, expected, ulps=100)


@needs_kernel
def test_it_goes_under_vmap_and_its_gradients_too():
    x, w, dimensions = array(3, 16, 128), array(128, 130), dims((1,), (0,))

    def loss(x):
        return jnp.sum(jnp.tanh(product.dot_general(x, w, dimensions)))

    close(jax.vmap(jax.grad(loss))(x), jnp.stack([jax.grad(loss)(each) for each in x]))


@needs_kernel
def test_nan_stays_in_its_row():
    x = array(16, 256).at[3, 7].set(jnp.nan)
    out = product.dot_general(x, array(256, 256), dims((1,), (0,)))
    np.testing.assert_array_equal(jnp.isnan(out).any(1), jnp.arange(16) == 3)


@pytest.mark.parametrize(
    "x, w, dimensions, options",
    [
        (array(2, 256), array(256, 256), dims((1,), (0,)), {}),
        (array(500, 256), array(256, 256), dims((1,), (0,)), {}),
        (array(32, 8), array(8, 8), dims((1,), (0,)), {}),
        (array(256, 32), array(256, 256), dims((0,), (0,)), {}),
        (array(2, 32, 128), array(2, 128, 128), (((2,), (1,)), ((0,), (0,))), {}),
        (array(32, 256).astype("bfloat16"), array(256, 256).astype("bfloat16"),
         dims((1,), (0,)), {"preferred_element_type": jnp.float32}),
        (array(32, 256), array(256, 256), dims((1,), (0,)), {"precision": jax.lax.Precision.HIGH}),
    ],
    ids=["two_rows", "many_rows", "small", "other_axes", "batch", "bfloat16", "precision"],
)  # fmt: skip
def test_elsewhere_it_is_lax(x, w, dimensions, options):
    assert not uses_kernel(x, w, dimensions, **options)
    expected = jax.lax.dot_general(x, w, dimensions, **options)
    found = product.dot_general(x, w, dimensions, **options)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_a_gradient_lays_no_cotangent_out_anew():
    """XLA's CPU compiler does for several axes of rows, which took four times as long as the rest."""
    x, w, dimensions = array(128, 98, 33), array(33, 128), dims((2,), (0,))

    def gradient(dot):
        return jax.jit(jax.grad(lambda x, w: (dot(x, w, dimensions) ** 2).sum(), (0, 1)))

    found, expected = gradient(product.dot_general), gradient(jax.lax.dot_general)
    assert " copy(" not in found.lower(x, w).compile().as_text()
    close(found(x, w), expected(x, w), ulps=1000)


def test_rows_on_a_mesh_keep_their_axes():
    """The axes may be split over different devices, which one axis cannot be."""
    x, w = array(2, 100, 33), array(33, 128)

    def made():
        return str(jax.make_jaxpr(lambda x, w: product.dot_general(x, w, dims((2,), (0,))))(x, w))

    assert "reshape" in made()
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "seq"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert "reshape" not in made()
