"""A wrong argument raises ValueError naming it, what came and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.testing import bad_calls

GOOD = {name: jnp.zeros(shape) for name, shape in bad_calls.GOOD.items()}

CALLS = list(bad_calls.bad_calls())

pytestmark = pytest.mark.usefixtures("in_production")


def test_good_arguments_are_good():
    assert xa.attend(**GOOD).shape == GOOD["q"].shape


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_bad_call_is_refused_in_one_clear_sentence(call):
    bad_calls.check_bad_call(xa.attend, call)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_explain_refuses_a_bad_call_in_the_same_words(call):
    bad_calls.check_bad_call(xa.explain, call)


@pytest.mark.parametrize("attend", [xa.attend, xa.explain])
def test_an_unknown_backend_is_refused_where_there_is_nothing_to_compute(attend):
    with pytest.raises(ValueError, match="backend is 'abacus'; expected one of .*'reference'"):
        attend(GOOD["q"], GOOD["k"][:, :0], GOOD["v"][:, :0], backend="abacus")


@pytest.mark.parametrize(
    ("q", "k", "said"),
    [
        ((2, 4, 5, 8), (2, 4, 7, 8), r"\[B N T H\] is to be jnp.swapaxes\(x, 1, 2\)"),
        ((2, 5, 8), (2, 7, 8), r"three are \[T N H\].* one head as x\[:, :, None\]"),
    ],
)
def test_axes_in_another_order_are_told_of_the_one_expected(q, k, said):
    with pytest.raises(ValueError, match=f"q has 5 heads and k has 7.*{said}") as refusal:
        xa.attend(jnp.zeros(q), jnp.zeros(k), jnp.zeros(k))
    assert len(str(refusal.value)) < 300


def test_a_mask_of_0_and_1_is_told_how_to_be_one():
    for call in (lambda mask: xa.attend(**GOOD, mask=mask), xa.masks.explicit):
        with pytest.raises(ValueError, match=r"dtype int32; .*\.astype\(bool\)"):
            call(jnp.ones((2, 1, 5, 7), jnp.int32))


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (
            jnp.ones((2, 1, 5, 7)),
            r"dtype float32; .*of 0.0 and 1.0, mask > 0; of 0 and -inf, bias=",
        ),
        ([[True]], r"mask is a list; .*jnp\.asarray\(x\), or one of crossattn\.masks"),
        (xa.masks.causal, r"mask is a function; .*call it: mask=causal\(\)"),
        (True, "mask is a bool; .*an array, or one of crossattn.masks"),
    ],
)
def test_what_is_no_mask_is_told_how_to_be_one(mask, said):
    with pytest.raises(ValueError, match=said):
        xa.attend(**GOOD, mask=mask)


def test_a_list_of_biases_is_no_mask():
    with pytest.raises(ValueError, match=r"bias is a list; .*\(an array, jnp\.asarray\(x\)\)"):
        xa.attend(**GOOD, bias=[[0.0]])


@pytest.mark.parametrize("key", [nnx.Rngs(0), nnx.Rngs(dropout=0).dropout])
def test_streams_of_keys_are_told_to_be_asked_for_one(key):
    with pytest.raises(ValueError, match=r"dropout_key is of type Rng.*such as rngs\.dropout\(\)"):
        xa.attend(**GOOD, dropout_rate=0.1, dropout_key=key)
    assert xa.attend(**GOOD, dropout_rate=0.1, dropout_key=nnx.Rngs(0).dropout()).ndim == 4
    assert xa.attend(**GOOD, dropout_rate=0.1, dropout_key=jax.random.PRNGKey(0)).ndim == 4


def test_an_option_that_does_not_exist():
    with pytest.raises(
        TypeError, match=r"attend\(\) .*'is_causal'; .*crossattn\.masks\.causal\(\)"
    ):
        xa.attend(**GOOD, is_causal=True)
    with pytest.raises(TypeError, match="dropout"):
        xa.attend(**GOOD, dropout=0.1)
    with pytest.raises(TypeError, match=r"'dropout'.*dropout_rate"):
        xa.explain(**GOOD, dropout=0.1)


def test_a_misspelt_name_of_the_facade_gets_a_suggestion():
    for wrong, right in {"atend": "attend", "mask": "masks", "model": "models"}.items():
        with pytest.raises(AttributeError, match=f"{wrong!r}; did you mean {right!r}"):
            getattr(xa, wrong)
    with pytest.raises(AttributeError, match="no attribute 'zzzz'$"):
        _ = xa.zzzz


def test_numbers_of_numpy_and_jax_are_numbers():
    plain = xa.attend(**GOOD, scale=0.5, softcap=2.0)
    for kind in (np.float32, np.float64, jnp.float32):
        found = xa.attend(**GOOD, scale=kind(0.5), softcap=kind(2.0))
        np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("jax_nn", {"softcap": 1.0}, "jax_nn: .*softcap; backend=None finds one"),
        ("splash", {}, "it runs on TPU, not on cpu"),
        ("flash_tpu", {}, "it runs on TPU, not on cpu"),
    ],
)
def test_a_backend_that_refuses_says_why_and_what_to_do(backend, options, said):
    with pytest.raises(NotImplementedError, match=said):
        xa.attend(**GOOD, backend=backend, **options)
