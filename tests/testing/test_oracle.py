"""The oracle itself: its gradients are finite differences, its log-sum-exp a plain sum."""

import numpy as np
import pytest

from crossattn import testing
from crossattn.testing import oracle
from crossattn.testing.case import array

CASES = testing.cases()


@pytest.mark.parametrize("name", ["bias_1x4x1x1", "softcap_then_bias", "segments_and_either"])
@pytest.mark.parametrize("lse", [False, True], ids=["output", "output_and_lse"])
def test_the_oracles_gradients_are_finite_differences(name, lse):
    case, step = CASES[name], 1e-5
    expected = case.expected_gradients_with_lse if lse else case.expected_gradients

    def energy(arrays):
        out, _, sums = oracle.attention(**arrays, allowed=case.allowed, **case.options)
        reads = np.isfinite(sums)
        return np.sum(case.cotangent * out) + lse * np.sum((case.lse_cotangent * sums)[reads])

    for argument, values in case.arrays.items():
        direction = array(f"direction of {argument}", *values.shape).astype(np.float64)
        ends = [energy({**case.arrays, argument: values + s * direction}) for s in (step, -step)]
        slope = (ends[0] - ends[1]) / (2 * step)
        wanted = np.sum(expected[argument] * direction)
        np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-7)


def test_the_oracle_of_equal_logits_is_the_mean_and_the_log_of_the_number_of_keys():
    q, v = np.zeros((1, 2, 1, 4)), array("v", 1, 8, 1, 3)
    out, weights, lse = oracle.attention(q, array("k", 1, 8, 1, 4), v)
    np.testing.assert_allclose(out[0, :, 0], np.stack([np.float64(v)[0, :, 0].mean(0)] * 2))
    np.testing.assert_allclose(weights, 1 / 8)
    np.testing.assert_allclose(lse, np.log(8))


def test_the_oracle_of_nothing_to_read():
    q, k = np.ones((1, 2, 1, 4)), np.full((1, 3, 1, 4), np.nan)
    out, weights, lse = oracle.attention(q, k, k, allowed=np.zeros((1, 1, 2, 3), bool))
    assert not out.any() and not weights.any()
    assert np.all(lse == -np.inf)
