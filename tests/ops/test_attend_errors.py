"""A wrong argument raises ValueError naming it, what came and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa

GOOD = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 6)}

pytestmark = pytest.mark.usefixtures("in_production")


def attend(q=None, k=None, v=None, mask=None, **options):
    """attend on good arguments, some of them replaced; a tuple stands for zeros of that shape."""
    given = {"q": q, "k": k, "v": v}
    given = {name: GOOD[name] if x is None else x for name, x in given.items()}
    given = {name: jnp.zeros(x) if isinstance(x, tuple) else x for name, x in given.items()}
    return xa.attend(**given, mask=mask, **options)


def refused(*words, **arguments):
    """Asserts a ValueError that says every one of the words."""
    with pytest.raises(ValueError) as error:
        attend(**arguments)
    said = str(error.value)
    missing = [word for word in words if word not in said]
    assert not missing, f"the message lacks {missing}: {said}"
    assert len(said) < 400, f"not one clear sentence: {said}"


def test_good_arguments_are_good():
    assert attend().shape == (2, 5, 4, 6)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("shape", [(8,), (7, 8)])
def test_too_few_axes(name, shape):
    refused(name, *map(str, shape), **{name: shape})


@pytest.mark.parametrize("name", ["k", "v"])
def test_other_batch_axes(name):
    _, *rest = GOOD[name]
    refused(name, "3", "2", **{name: (3, *rest)})
    refused(name, **{name: tuple(rest)})
    refused(name, **{name: (1, *GOOD[name])})


def test_keys_of_another_size_than_queries():
    refused("k", "8", "9", k=(2, 7, 2, 9))


def test_another_number_of_values_than_keys():
    refused("v", "6", "7", v=(2, 6, 2, 6))


def test_another_number_of_value_heads_than_key_heads():
    refused("v", "heads", "1", "2", v=(2, 7, 1, 6))


def test_query_heads_that_key_heads_do_not_divide():
    refused("heads", "4", "3", k=(2, 7, 3, 8), v=(2, 7, 3, 6))


def test_more_key_heads_than_query_heads():
    refused("heads", "4", "8", k=(2, 7, 8, 8), v=(2, 7, 8, 6))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_queries_keys_and_values_are_floats(name, dtype):
    refused(name, dtype, "float", **{name: jnp.zeros(GOOD[name], dtype)})


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_a_mask_is_boolean(dtype):
    refused("mask", dtype, "bool", mask=jnp.zeros((2, 1, 1, 7), dtype))


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_a_bias_is_float(dtype):
    refused("bias", dtype, "float", bias=jnp.zeros((2, 4, 5, 7), dtype))


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize(
    "shape", [(7,), (5, 7), (1, 2, 4, 5, 7), (2, 4, 5, 6), (2, 4, 7, 5), (2, 2, 5, 7), (3, 1, 1, 7)]
)
def test_masks_and_biases_broadcast_to_the_weights(name, shape):
    array = jnp.zeros(shape, bool if name == "mask" else jnp.float32)
    refused(name, *map(str, shape), *map(str, (2, 4, 5, 7)), **{name: array})


def test_a_mask_term_of_another_number_of_keys():
    refused("6", "7", mask=xa.masks.key_padding(np.ones((2, 6), bool)))


def test_a_mask_term_of_other_batch_axes():
    refused("mask", mask=xa.masks.key_padding(np.ones((3, 7), bool)))


def test_an_unknown_backend():
    refused("backend", "abacus", "reference", backend="abacus")


def test_dropout_without_a_key():
    refused("dropout_key", "0.1", dropout_rate=0.1)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_dropout_rate_that_is_no_probability(rate):
    refused("dropout_rate", str(rate), dropout_rate=rate, dropout_key=jax.random.key(0))
