"""Calls of cuDNN and their results, held to the oracle without a GPU: ``pretended_gpu``."""

import functools
import warnings

import pytest

import crossattn as xa
from crossattn import testing
from crossattn.ops import backends
from tests.ops.pretended_gpu import pretended_gpu

# The kernels make the weights from a float32 log-sum-exp, as here: of such logits it has three digits, and a
# weight of 1 is not its own mean to the last bit.
_ROUNDED = {
    "logits_of_ten_thousands",
    "every_logit_far_below_zero",
    "bias_of_a_hundred_thousand",
    "sharded_arrays",
    "shard_map",
}
GRADIENTS = [item for item in testing.items(promises=["gradients"]) if item.case not in _ROUNDED]
EVERY_THIRD = {item.case for item in GRADIENTS[::3]}
LSE = [item for item in testing.items(promises=["log-sum-exp"]) if item.case in EVERY_THIRD]
ELSEWHERE = ("weights", "meshes", "errors", "gradients", "log-sum-exp")
NAMED = [item for item in testing.items(quick=True) if item.promise not in ELSEWHERE]
NAMED = [item for item in NAMED if item.case not in ("sharded_arrays", "shard_map")]


def in_two_stages(items):
    """Every fourth at once, the others in the second stage."""
    return [
        pytest.param(
            item, id=f"{item.promise}-{item.case}", marks=[] if i % 4 == 0 else pytest.mark.slow
        )
        for i, item in enumerate(items)
    ]


@pytest.fixture(autouse=True)
def _here_is_a_gpu(monkeypatch):
    monkeypatch.setattr(backends, "_FEW", 0)  # the cases are of few queries
    with pretended_gpu(float32=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attend runs 'reference'")
        yield


@pytest.mark.quick(4)
@pytest.mark.parametrize("item", in_two_stages(GRADIENTS))
def test_outputs_and_gradients_are_the_oracles(item):
    testing.check(xa.attend, testing.cases()[item.case])


@pytest.mark.quick(1)
@pytest.mark.parametrize("item", in_two_stages(LSE))
def test_the_log_sum_exp_and_its_gradient_are_the_oracles(item):
    item.check(xa.attend)


@pytest.mark.parametrize("item", in_two_stages(NAMED))
def test_asked_for_by_name_it_keeps_its_promises_or_refuses(item):
    try:
        item.check(functools.partial(xa.attend, backend="jax_nn"))
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
