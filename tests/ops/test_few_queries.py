"""Few queries on an accelerator: plain products take over, and what is hidden stays hidden in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.ops import backends, masks, platforms
from crossattn.ops.call import Call
from tests.closeness import close
from tests.compiled import compiled

B, S, H = 2, 9, 8
CASES = {  # queries, their heads, key heads, what the mask tells apart [#B #N #T #S]
    "one query": (1, 4, 4, (B, 1, 1, S)),
    "grouped heads": (1, 4, 2, (B, 1, 1, S)),
    "each head its own": (1, 4, 4, (B, 4, 1, S)),
    "heads of a group apart": (1, 4, 2, (B, 4, 1, S)),
    "beams of one source": (4, 4, 2, (B, 1, 1, S)),
    "beams apart": (4, 4, 2, (B, 1, 4, S)),
}


def drawn(case):
    rng = np.random.default_rng(0)
    T, N, K, form = CASES[case]
    q, k, v = (rng.normal(size=(B, *size, H)) for size in ((T, N), (S, K), (S, K)))
    allowed = rng.random(form) > 0.5
    allowed[0, ..., 0] = True
    allowed[1] = False  # these read nothing
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32), allowed


def on_tpu(call, *arguments):
    with platforms.lowered_for(platforms.Target("tpu", True)):
        return compiled(call, *arguments)


@pytest.mark.quick(6)
@pytest.mark.parametrize("as_bias", [False, True], ids=["mask", "bias"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_masked_reaches_neither_output_nor_gradient(case, as_bias):
    q, k, v, allowed = drawn(case)
    options = dict(bias=jnp.where(allowed, 0.5, -jnp.inf)) if as_bias else {}
    mask = None if as_bias else xa.Mask((masks.Explicit(jnp.asarray(allowed)),))

    def attended(q, k, v):
        # An operation that is lowered later has a platform of its own; one with weights is not.
        options_of_now = dict(backend="reference", return_weights=True, **options)
        return xa.attend(q, k, v, mask, **options_of_now)[0]

    def gradients(q, k, v):
        return jax.grad(lambda *x: (attended(*x) ** 2).sum(), (0, 1, 2))(q, k, v)

    hidden = ~np.broadcast_to(allowed, (B, q.shape[2], q.shape[1], S)).any((1, 2))[..., None, None]
    spoilt = q, np.where(hidden, np.nan, k), np.where(hidden, np.inf, v)
    expected, gradient = compiled(attended, q, k, v), compiled(gradients, q, k, v)
    output = on_tpu(attended, *spoilt)
    close(output, expected)
    for found, one in zip(on_tpu(gradients, *spoilt), gradient, strict=True):
        close(found, one)
    assert not np.asarray(output)[1].any()


def test_a_nan_that_one_beam_reads_reaches_no_other():
    q, k, v, allowed = drawn("beams apart")
    v[0, 3] = np.nan
    allowed[0, 0, :, 3] = [True, False, True, False]
    mask = xa.Mask((masks.Explicit(jnp.asarray(allowed)),))
    found = on_tpu(lambda: xa.attend(q, k, v, mask, backend="reference", return_weights=True)[0])
    np.testing.assert_array_equal(np.isnan(found[0]).any((1, 2)), allowed[0, 0, :, 3])


def test_up_to_so_many_queries_that_logits_weigh_as_much_as_keys_and_values():
    shape = lambda *sizes: jnp.zeros((2, *sizes), jnp.bfloat16)  # noqa: E731

    def few(T, N, K, H):
        q, k = shape(T, N, H), shape(8, K, H)
        with platforms.lowered_for(platforms.Target("tpu", True)):
            found = backends.few_queries(q, k)
            for backend in ("chunked", "flash_tpu", "jax_nn", "splash"):
                assert (backends.unsuited(backend, Call(q, k, k)) is not None) >= found
        return found

    assert few(1, 16, 16, 64) and few(64, 16, 16, 64) and not few(65, 16, 16, 64)
    assert few(32, 16, 4, 128) and not few(33, 16, 4, 128)
    assert few(64, 1, 1, 1024) and not few(512, 1, 1, 1024)  # a product's own time counts too
    assert not backends.few_queries(shape(2, 16, 64), shape(8, 16, 64))  # on this CPU
