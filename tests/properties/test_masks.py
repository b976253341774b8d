"""Attention, its statistics and its module on one device, under any mask: held to float64 numpy.

Parts that merge, memories and caches are held so in ``tests/ops`` and ``tests/nn``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossattn as xa
from crossattn import testing
from crossattn.testing import checks, oracle
from tests.properties import examples, generators
from tests.properties.calls import cases, masks

pytestmark = pytest.mark.usefixtures("in_production")

FLOAT32 = st.just(np.float32)


def taken(attend, case):
    """attend(case), or nothing where a backend says that it does not take such a call."""
    try:
        testing.check(attend, case)
    except NotImplementedError:
        assert attend.keywords["backend"] not in (None, "reference")


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", [None, "cpu", "chunked", "reference", "jax_nn"])
@examples(10)
@given(case=cases())
def test_output_and_gradients_of_every_backend_are_the_oracles(backend, case):
    taken(functools.partial(xa.attend, backend=backend), case)


@pytest.mark.parametrize("check", [testing.check_weights, testing.check_lse])
@examples(4)
@given(case=cases())
def test_weights_and_log_sum_exp_are_the_oracles(check, case):
    check(xa.attend, case)


@examples(5)
@given(case=cases(dtypes=FLOAT32, poison=False))
def test_statistics_are_those_of_the_oracles_weights(case):
    measured = jax.jit(
        lambda q, k: xa.attention_stats(q, k, case.mask, bias=case.bias, **case.options)
    )
    stats = measured(case.q, case.k)
    w, reads = case.expected[1], case.readable.any(-1)
    expected = {
        "entropy": -np.sum(w * np.log(np.where(w > 0, w, 1)), -1),
        "maximum": w.max(-1),
        "expected": np.sum(w * np.arange(w.shape[-1]), -1),
        "mass": w.sum(-2),
    }
    for name, value in expected.items():
        checks.close(getattr(stats, name), value, name, ulps=4)
    assert np.all(np.asarray(stats.lse)[~reads] == -np.inf)
    checks.close(np.asarray(stats.lse)[reads], case.expected[2][reads], "log-sum-exp")


@pytest.mark.slow
@examples(6)
@given(
    data=st.data(),
    random=generators,
    T=st.integers(1, 7),
    S=st.integers(1, 7),
    K=st.integers(1, 3),
    G=st.integers(1, 3),
)
def test_a_module_projects_attends_and_projects(data, random, T, S, K, G):
    N, D = K * G, 8
    batch = data.draw(st.sampled_from([(), (1,), (2,), (3,)]))
    options = data.draw(st.sampled_from([{}, {"softcap": 3.0}]))
    H, biased = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.booleans())
    build = lambda rngs: xa.nn.MultiHeadAttention(  # noqa: E731
        D, N, head_dim=H, num_kv_heads=K, use_bias=biased, rngs=rngs, **options
    )
    made = xa.init(build, jax.random.key(0))
    params = jax.tree.map(lambda x: np.float32(random.normal(size=x.shape) / 2), made)
    x, memory = (np.float32(random.normal(size=(*batch, n, D))) for n in (T, S))
    mask, allowed = data.draw(masks(batch, N, T, S))
    allowed = np.broadcast_to(allowed, (*batch, N, T, S))
    if mask is not None and data.draw(st.booleans()):
        mask = jnp.asarray(allowed)

    def projected(name, y):
        p = {part: np.float64(value) for part, value in params[name].items()}
        return np.einsum("...td,dnh->...tnh", np.float64(y), p["kernel"]) + p.get("bias", 0)

    q, k, v = projected("query", x), projected("key", memory), projected("value", memory)
    mixed = oracle.attention(q, k, v, allowed, **options)[0]
    expected = np.einsum("...tnh,nhd->...td", mixed, np.float64(params["out"]["kernel"]))
    expected = expected + np.float64(params["out"].get("bias", 0))
    checks.close(xa.apply(build, params, x, memory, mask), expected, "output", ulps=4)
