"""Every backend keeps attend's promises, case by case, or says why it refuses the case."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn import testing
from crossattn.ops import backends
from crossattn.testing import case as shared
from tests.closeness import close
from tests.compiled_kernel import MISSING
from tests.conftest import as_users_have_it

CASES = testing.cases()
ITEMS = {f"{item.promise}-{item.case}": item for item in testing.items()}
QUICK = {f"{item.promise}-{item.case}" for item in testing.items(quick=True)}
# make conformance runs everything on everything. Here a backend gets every case once, with gradients,
# and one of each kind of the rest; what a wrong call is told does not depend on the backend.
PER_BACKEND = {"gradients", "log-sum-exp"}
ALL = {n for n in QUICK if not n.startswith("errors-")}
ALL = [n for n, i in ITEMS.items() if i.promise == "gradients" or n in ALL]
CHOSEN = [n for n, i in ITEMS.items() if n in QUICK or i.promise not in PER_BACKEND]
MAY_REFUSE_NOTHING = (None, "reference")
BACKENDS = [None, *backends.names()]


def of_two_stages(names):
    """One of each kind of case at once, and wrong calls; the others in the second stage."""
    first = QUICK | {name for name in names if ITEMS[name].promise == "errors"}
    return [pytest.param(n, marks=[] if n in first else pytest.mark.slow) for n in names]


def refused(check, backend):
    """Runs one check; the reason for which the backend refused, "" where it kept the promise."""
    try:
        check(functools.partial(xa.attend, backend=backend))
    except NotImplementedError as refusal:
        assert backend not in MAY_REFUSE_NOTHING, f"{backend} refused: {refusal}"
        assert str(refusal), f"{backend} refused without a reason"
        return str(refusal)
    return ""


def where_it_runs(backend):
    """The backend as a parameter, which is skipped where it cannot take even the plain case."""
    case = CASES["no_mask_at_all"]
    why = xa.explain(case.q, case.k, case.v, backend=backend).refused.get(backend)
    return pytest.param(backend, marks=[] if why is None else pytest.mark.skip(why))


@pytest.fixture(autouse=True)
def _errors_are_attends_own(request):
    """The runtime type checks of the tests would refuse a bad call first."""
    if "errors" in request.node.name:
        request.getfixturevalue("in_production")


@pytest.mark.parametrize("backend", [where_it_runs(name) for name in backends.names()])
@pytest.mark.parametrize("name", of_two_stages(ALL))
def test_a_backend_keeps_its_promises_or_refuses(name, backend):
    item, check = ITEMS[name], ITEMS[name].check
    if item.promise == "gradients":  # with the output, which differentiation may compute otherwise
        check = functools.partial(testing.check, case=CASES[item.case])
    if why := refused(check, backend):
        pytest.skip(why)


@pytest.mark.parametrize("name", of_two_stages(CHOSEN))
def test_attend_keeps_its_promises_when_no_backend_is_named(name):
    assert not refused(ITEMS[name].check, None)


DEFAULTS = """
import functools, crossattn as xa
from crossattn import testing
every = [name for name in testing.PROMISES if name != "errors"]
for backend, promises in ((None, every), ("chunked", ("gradients", "composition"))):
    attend = functools.partial(xa.attend, backend=backend)
    for finding in testing.conformance(attend, quick=True, promises=promises):
        print(backend, *finding)
"""


@pytest.mark.slow
def test_promises_are_kept_as_users_compile_with_all_of_xlas_passes():
    """One of each kind, gradients and composition included; the tests above go without most passes."""
    done = subprocess.run(
        [sys.executable, "-c", DEFAULTS], env=as_users_have_it(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 60
    assert not [line for line in lines if not line.endswith(" kept")]


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_backend_serves_at_least_the_plain_case(backend):
    if backend == "cpu" and MISSING:
        pytest.skip(MISSING)
    plain = [CASES["every_head_its_own_keys"], CASES["no_mask_at_all"], CASES["causal"]]
    checks = [functools.partial(testing.check, case=case) for case in plain]
    served = not all(refused(check, backend) for check in checks)
    if not served and backend in ("flash_tpu", "splash", "tokamax"):
        pytest.skip("two need a TPU, tokamax its package")
    assert served


def test_masks_as_arrays_terms_and_additive_biases_agree():
    case = CASES["causal_and_padding"]
    mask = case.mask.materialize(shared.T, shared.S)
    additive = case.mask.to_bias(shared.T, shared.S)
    by_term = xa.attend(case.q, case.k, case.v, case.mask)
    by_array = xa.attend(case.q, case.k, case.v, mask)
    by_bias = xa.attend(case.q, case.k, case.v, bias=additive)
    np.testing.assert_array_equal(by_term, by_array)
    close(by_term, by_bias)


def test_weights_and_log_sum_exp_come_together():
    case = CASES["causal"]
    options = {"return_weights": True, "return_lse": True}
    found = xa.attend(case.q, case.k, case.v, case.mask, **options)
    for x, expected in zip(found, case.expected, strict=True):
        close(x, expected)


def test_an_unnamed_scale_is_one_over_the_root_of_the_head_size():
    q, k, v = (jnp.asarray(shared.array(name, 1, 3, 2, 16)) for name in "qkv")
    attend = jax.jit(xa.attend)
    np.testing.assert_array_equal(attend(q, k, v), attend(q, k, v, scale=0.25))
