"""Each kind of call of the table in ``docs/attend.md``, run: fused as the table says, and right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from tests.ops import lowered

PLAIN = {
    "dropout",
    "head size 1,024, 50,176 keys",
    "float32",
}  # and softcap, where tokamax is not installed
KINDS = [pytest.param(kind, id=kind.name) for kind in lowered.KINDS if kind.name != "dropout"]


def drawn(kind, random, x):
    if x.dtype == bool:
        return jnp.asarray(random.random(x.shape) < 0.7)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.asarray(random.standard_normal(x.shape) if x.shape else 0.2, x.dtype)
    if x.shape == (2,):
        return jnp.asarray([100, 251])
    if x.shape == ():
        return jnp.asarray(3)
    rows = np.sort(random.integers(0, 4, x.shape), -1) if "packed" in kind.name else None
    return jnp.asarray(np.arange(x.shape[1])[None].repeat(2, 0) if rows is None else rows)


def with_gradients(kind, operands, backend):
    """Outputs and gradients in float32, and the text of the compiled program."""
    floating = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]
    shape = (kind.B, kind.T, kind.N, kind.Hv or kind.H)
    cotangent = jax.random.normal(jax.random.key(1), shape).astype(jnp.bfloat16)

    def loss(*given):
        whole = list(operands)
        for i, x in zip(floating, given, strict=True):
            whole[i] = x
        q, k, v, *arrays = whole
        options = kind.options(*arrays) | {"backend": backend}
        results = jax.tree.leaves(xa.attend(q, k, v, kind.mask(*arrays), **options))
        weighted = jnp.sum(results[0].astype(jnp.float32) * cotangent)
        return weighted + sum(jnp.where(jnp.isfinite(x), x, 0).sum() for x in results[1:]), results

    given = [operands[i] for i in floating]
    compiled = (
        jax.jit(jax.grad(loss, tuple(range(len(given))), has_aux=True)).lower(*given).compile()
    )
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), compiled(*given))
    return jax.tree.leaves(found), compiled.as_text()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:attend runs")
def test_a_kind_of_call_is_fused_and_right(kind):
    random = np.random.default_rng(0)
    operands = [drawn(kind, random, x) for x in kind.shapes]
    found, text = with_gradients(kind, operands, None)
    wide = [
        x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x for x in operands
    ]
    expected, _ = with_gradients(kind, wide, "chunked")
    for one, other in zip(found, expected, strict=True):
        known = np.isfinite(other)
        error = np.linalg.norm((one - other)[known]) / np.linalg.norm(other[known])
        assert error < (2e-5 if kind.dtype == "float32" else 6e-3)
    if kind.name != "softcap":
        assert text.count('custom_call_target="__cudnn$fmha') == (0 if kind.name in PLAIN else 2)
