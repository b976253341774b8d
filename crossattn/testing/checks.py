"""Holds any callable with attend's signature to a conformance case, in three ways."""

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 2e-5, "float16": 2.0**-10, "bfloat16": 2.0**-8}


def check_output(attend, case):
    """The output is the oracle's, in the dtype of q, and exactly 0 where nothing may be read."""
    _check_output(_run(_outputs(attend, case), case), case)


def check_weights(attend, case):
    """Returned weights are the oracle's, exactly 0 where masked, beside an unchanged output."""
    out, weights = _run(_outputs(attend, case, return_weights=True), case)
    _check_output(out, case)
    assert weights.shape == case.weights_shape
    weights, clean = np.float64(weights), np.moveaxis(case.clean, -1, -2)
    _close(weights[clean], case.expected[1][clean], "weights", case.q.dtype)
    assert not weights[clean][~case.readable[clean]].any(), "a masked key has weight"


def check_gradients(attend, case):
    """Output and gradients are the oracle's, and exactly 0 for whatever takes no part."""

    def outputs_and_gradients(arrays):
        out, pull = jax.vjp(_outputs(attend, case), arrays)
        return out, pull(jnp.asarray(case.cotangent))[0]

    out, found = _run(outputs_and_gradients, case)
    _check_output(out, case)
    alone = ~np.moveaxis(case.readable.any(-1), -2, -1)
    assert not np.float64(found["q"])[alone].any(), "a query that reads nothing has a gradient"
    if not case.clean.all():  # k, v and bias also learn from the queries that read the poison
        found = {"q": found["q"]}
    for name, gradient in found.items():
        dtype = min(case.q.dtype, gradient.dtype, key=lambda dtype: dtype.itemsize)
        expected, gradient = case.expected_gradients[name], np.float64(gradient)
        assert gradient.shape == expected.shape, f"gradient of {name}"
        if name == "q":
            gradient, expected = gradient[case.clean], expected[case.clean]
        _close(gradient, expected, f"gradient of {name}", dtype, ulps=8, least=0.1)
    if "k" in found:
        unread = ~case.readable.any(axis=(-3, -2))
        assert not np.float64(found["k"])[unread].any(), "a key nobody reads has a gradient"
        assert not np.float64(found["v"])[unread].any(), "a value nobody reads has a gradient"


def _outputs(attend, case, **options):
    """attend as a function of the case's arrays by name."""
    options = {**case.options, **options}
    return lambda arrays: attend(mask=case.mask, **arrays, **options)


def _run(function, case):
    """Applies to the case's arrays; compiled as one unless the operations are compiled already."""
    function = function if case.shared else jax.jit(function)
    return function(jax.tree.map(jnp.asarray, case.arrays))


def _check_output(out, case):
    assert out.dtype == case.q.dtype
    assert out.shape == case.cotangent.shape
    out, expected = np.float64(out), case.expected[0]
    _close(out[case.clean], expected[case.clean], "output", case.q.dtype)
    alone = ~np.moveaxis(case.readable.any(-1), -2, -1)
    assert not out[alone].any(), "a query that reads nothing has an output"


def _close(found, expected, what, dtype, ulps=1, least=1e-3):
    """Relative to the dtype, with an absolute part that follows the largest entry."""
    rtol = ulps * TOLERANCE[np.dtype(dtype).name]
    atol = (1e-5 if ulps == 1 else rtol) * max(np.abs(expected).max(initial=0.0), least)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol, err_msg=what)
