"""The conformance suite on a GPU: float32 by its own bounds, kernels of 16 bits by theirs.

Fused kernels round a weight to the operands' type before they multiply it with a value, and cuDNN's round a
bias: each output is within the rounding of its weights and its own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn import testing
from crossattn.testing import checks
from crossattn.testing.oracle import float64

pytestmark = pytest.mark.filterwarnings("ignore:attend runs")
CASES = testing.cases()
NARROW = {name for name, case in CASES.items() if case.q.dtype.itemsize < 4}
KERNELS = ("jax_nn", "tokamax")
# Float32 logits of such sizes have three digits left, of which tokamax's gradients have fewer.
_LARGE = ("logits_of_ten_thousands", "every_logit_far_below_zero", "bias_of_a_hundred_thousand")


def named(items):
    return [pytest.param(item, id=f"{item.promise}-{item.case}") for item in items]


@pytest.mark.parametrize("item", named(x for x in testing.items() if x.case not in NARROW))
def test_attend_keeps_its_promises_in_float32(item):
    item.check(xa.attend)


def narrowed(case):
    """The case in bfloat16, with a bias of whole matrices that bfloat16 holds."""
    with np.errstate(all="ignore"):
        operands = {name: np.asarray(getattr(case, name)).astype(jnp.bfloat16) for name in "qkv"}
    bias = case.bias
    if bias is not None:
        bias = np.asarray(bias).astype(jnp.bfloat16).astype(np.float32)
        bias = np.broadcast_to(bias, case.weights_shape).copy()
    case = case if case.name in NARROW else dataclasses.replace(case, **operands)
    return dataclasses.replace(case, bias=bias)


def check_output(attend, case):
    options = case.options | ({} if case.mask is None else {"mask": case.mask})
    out = jax.device_get(jax.jit(lambda arrays: attend(**arrays, **options))(case.arrays))
    assert out.dtype == case.q.dtype
    out, (expected, weights, _) = float64(out), case.expected
    checks.zero(out[case.reads_nothing], "the output of a query that reads nothing")
    read = case.clean & ~case.reads_nothing
    values = np.repeat(np.abs(float64(case.v)), case.q.shape[-2] // case.k.shape[-2], axis=-2)
    values = np.where(np.isfinite(values), values, 0)
    size = np.einsum("...nts,...snh->...tnh", weights, values) + np.abs(expected)
    bound = float(jnp.finfo(case.q.dtype).eps) / 2 * size + 1e-4 * size.max(initial=0.0)
    wrong = (np.abs(out - expected) > bound)[read] | ~np.isfinite(out[read])
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ"


@pytest.mark.parametrize("backend", (None, *KERNELS))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("many_queries")
def test_kernels_compute_what_the_oracle_does(name, backend):
    attend, case = functools.partial(xa.attend, backend=backend), narrowed(CASES[name])
    try:
        check_output(attend, case)
        if case.gradients and not (backend == "tokamax" and name in _LARGE):
            testing.check_gradients(attend, case)
    except NotImplementedError as refusal:
        assert backend is not None
        pytest.skip(str(refusal))


@pytest.mark.parametrize("name", [n for n in CASES if not CASES[n].reads_nothing.all()])
@pytest.mark.usefixtures("many_queries")
def test_the_log_sum_exp_of_cudnn_has_float32s_digits(name):
    case = narrowed(CASES[name])
    if "softcap" in case.options:
        pytest.skip("cuDNN has no softcap")
    testing.check_lse(functools.partial(xa.attend, backend="jax_nn"), case)
