"""Every backend keeps attend's promises, case by case, or says why it refuses the case."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.ops import backends
from crossattn.testing import case as cases
from crossattn.testing import checks, families, oracle

CASES = families.every_case()
SHARED = [name for name, case in CASES.items() if case.shared]
OTHER_WEIGHTS = ["no_batch_axis", "two_batch_axes_padded", "one_query", "no_keys", "bfloat16"]
MAY_REFUSE_NOTHING = (None, "reference")
BACKENDS = [None, *backends.names()]


def holds(check, backend, case):
    """Runs one check; False where the backend refused with a reason."""
    try:
        check(functools.partial(xa.attend, backend=backend), case)
    except NotImplementedError as refusal:
        assert backend not in MAY_REFUSE_NOTHING, f"{backend} refused: {refusal}"
        assert str(refusal), f"{backend} refused without a reason"
        return False
    return True


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_oracles(name, backend):
    case = CASES[name]
    holds(checks.check_gradients if case.gradients else checks.check_output, backend, case)


@pytest.mark.parametrize("backend", backends.names())
@pytest.mark.parametrize("name", SHARED + OTHER_WEIGHTS)
def test_weights_are_the_oracles_or_refused(name, backend):
    holds(checks.check_weights, backend, CASES[name])


@pytest.mark.parametrize("name", SHARED)
def test_weights_are_the_oracles_when_no_backend_is_named(name):
    checks.check_weights(xa.attend, CASES[name])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_backend_serves_at_least_the_plain_case(backend):
    plain = [CASES["every_head_its_own_keys"], CASES["no_mask_at_all"], CASES["causal"]]
    assert any(holds(checks.check_gradients, backend, case) for case in plain)


def test_the_reference_is_a_backend():
    assert "reference" in backends.names()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_nan_that_may_be_read_is_not_hidden(backend):
    def check(attend, case):
        out = np.asarray(attend(case.q, case.k, case.v, case.mask))
        np.testing.assert_array_equal(np.isnan(out).all(-1), ~case.clean)

    holds(check, backend, CASES["nan_in_future_v"])


def test_a_masked_query_of_nan_reads_nothing_and_spoils_nothing():
    lengths, queries = np.array([7, 7]), np.array([5, 2])
    allowed = (np.arange(cases.T) < queries[:, None])[:, None, :, None]
    clean = cases.case("clean", xa.masks.lengths(lengths, queries), allowed)
    q = np.where(np.moveaxis(allowed, 1, -1), clean.q, np.nan)
    checks.check_gradients(xa.attend, cases.case("spoilt", clean.mask, allowed, q=q))


def test_masks_as_arrays_terms_and_additive_biases_agree():
    case = CASES["causal_and_padding"]
    mask = case.mask.materialize(cases.T, cases.S)
    additive = case.mask.to_bias(cases.T, cases.S)
    by_term = xa.attend(case.q, case.k, case.v, case.mask)
    by_array = xa.attend(case.q, case.k, case.v, mask)
    by_bias = xa.attend(case.q, case.k, case.v, bias=additive)
    np.testing.assert_array_equal(by_term, by_array)
    np.testing.assert_allclose(by_term, by_bias, atol=1e-6)


@pytest.mark.parametrize("j", [0, 3, 4])
def test_a_change_at_a_position_moves_no_output_before_it(j):
    case = CASES["causal"]
    before = xa.attend(case.q, case.k, case.v, case.mask)
    k, v = case.k.copy(), case.v.copy()
    k[:, j], v[:, j] = 1e3, -1e3
    after = xa.attend(case.q, k, v, case.mask)
    np.testing.assert_array_equal(after[:, :j], before[:, :j])
    assert np.all(np.asarray(after != before)[:, j].any(-1))


def test_weights_sum_to_one_or_to_exactly_zero():
    case = CASES["some_rows_read_nothing"]
    _, weights = xa.attend(case.q, case.k, case.v, case.mask, return_weights=True)
    np.testing.assert_allclose(weights.sum(-1), case.readable.any(-1), atol=1e-6)


def test_an_unnamed_scale_is_one_over_the_root_of_the_head_size():
    q, k, v = (jnp.asarray(cases.array(name, 1, 3, 2, 16)) for name in "qkv")
    attend = jax.jit(xa.attend)
    np.testing.assert_array_equal(attend(q, k, v), attend(q, k, v, scale=0.25))


@pytest.mark.parametrize("name", ["bias_1x4x1x1", "softcap_then_bias", "segments_and_either"])
def test_the_oracles_gradients_are_finite_differences(name):
    case, step = CASES[name], 1e-5
    for argument, array in case.arrays.items():
        direction = cases.array(f"direction of {argument}", *array.shape).astype(np.float64)
        moved = [{**case.arrays, argument: array + sign * direction} for sign in (step, -step)]
        ends = [oracle.attention(**a, allowed=case.allowed, **case.options)[0] for a in moved]
        slope = np.sum(case.cotangent * (ends[0] - ends[1])) / (2 * step)
        expected = np.sum(case.expected_gradients[argument] * direction)
        np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-7)
