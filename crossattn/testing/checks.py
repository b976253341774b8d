"""Holds any callable with attend's signature to one case, in four ways.

Each check returns nothing, or raises ``Broken`` with what differs from the oracle. What the callable
itself raises goes through.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.testing import oracle
from crossattn.testing.case import Case
from crossattn.testing.oracle import float64

TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "float16": 2.0**-10, "bfloat16": 2.0**-8}


class Broken(AssertionError):
    """Broken promise; the message says what was found and what was expected."""


def check_output(attend, case: Case) -> None:
    """Checks that the output is the oracle's, in the dtype of q, and 0 where nothing may be read."""
    out = _run(_outputs(attend, case), case)
    _compare_output(out, case)
    _compare_nothing(out, case)


def check_output_where_read(attend, case: Case) -> None:
    """Checks the output of the queries that may read something."""
    _compare_output(_run(_outputs(attend, case), case), case)


def check_weights(attend, case: Case) -> None:
    """Checks that returned weights are the oracle's, and exactly 0 where masked."""
    _, weights = _run(_outputs(attend, case, return_weights=True), case)
    expect(weights is not None, "weights are None")
    _compare_shape(weights, case.weights_shape, "weights")
    weights, clean = float64(weights), np.moveaxis(case.clean, -1, -2)
    close(weights[clean], case.expected[1][clean], "weights", case.q.dtype)
    zero(weights[clean][~case.readable[clean]], "the weight of a masked key")


def check_gradients(attend, case: Case) -> None:
    """Checks that gradients are the oracle's, and exactly 0 for whatever takes no part."""
    _, gradients = _run(_with_gradients(attend, case), case)
    _compare_gradients(gradients, case.expected_gradients, case)


def check_output_and_gradients(attend, case: Case) -> None:
    """Checks both from one call: differentiation may take another path to the output."""
    out, gradients = _run(_with_gradients(attend, case), case)
    _compare_nothing(out, case)
    _compare_output(out, case)
    _compare_gradients(gradients, case.expected_gradients, case)


def check_lse(attend, case: Case) -> None:
    """Checks that log-sum-exp (float32, -inf where nothing may be read) and gradients are the oracle's."""

    def lse_and_gradients(arrays):
        (out, lse), pull = jax.vjp(_outputs(attend, case, return_lse=True), arrays)
        if not case.gradients:
            return lse, None
        return lse, pull((_cotangent(case, out), jnp.asarray(case.lse_cotangent, lse.dtype)))[0]

    lse, gradients = _run(lse_and_gradients, case)
    _compare_shape(lse, case.weights_shape[:-1], "log-sum-exp")
    expect(lse.dtype == np.float32, f"the log-sum-exp is {lse.dtype}, not float32")
    lse, expected, reads = float64(lse), case.expected[2], case.readable.any(-1)
    expect(np.all(lse[~reads] == -np.inf), "the log-sum-exp of nothing is not -inf")
    reads = reads & np.moveaxis(case.clean, -1, -2)
    close(lse[reads], expected[reads], "log-sum-exp", np.float32)
    if gradients is not None:
        _compare_gradients(gradients, case.expected_gradients_with_lse, case)


def check_energy_gradients(actual, arrays, allowed) -> None:
    """Checks gradients of sum(sin(output)) with respect to q, k and v."""
    out = oracle.attention(*arrays, allowed=allowed)[0]
    expected = oracle.gradients(np.cos(out), *arrays, allowed=allowed)
    for name, gradient in zip("qkv", actual, strict=True):
        close(gradient, expected[name], f"gradient of {name}", ulps=8)


def close(actual, expected, what, dtype: Any = np.float32, ulps=1, least=1e-3) -> None:
    """Compares relative to the dtype, with an absolute part that follows the largest entry."""
    actual, expected = float64(actual), float64(expected)
    _compare_shape(actual, expected.shape, what)
    rtol = ulps * TOLERANCE[np.dtype(dtype).name]
    atol = (min(1e-5, rtol) if ulps == 1 else rtol) * max(np.abs(expected).max(initial=0.0), least)
    wrong = ~np.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    if wrong.any():
        bad, good = actual[wrong], expected[wrong]
        if not np.isfinite(bad).all():
            said = f"{(~np.isfinite(bad)).sum()} of {actual.size} are NaN or Inf"
        else:
            worst = np.argmax(np.abs(bad - good))
            said = f"{wrong.sum()} of {actual.size} differ, {bad[worst]:.6g} for {good[worst]:.6g}"
        raise Broken(f"{what}: {said}")


def zero(actual, what) -> None:
    """Checks that numbers are exactly 0, and not NaN."""
    actual = float64(actual)
    if np.any(actual != 0):
        raise Broken(f"{what} is not 0 but {actual[actual != 0][0]:.6g}")


def expect(kept, what: str) -> None:
    """Raises ``Broken(what)`` unless kept."""
    if not kept:
        raise Broken(what)


def _outputs(attend, case, **options):
    """Returns the function that is tested, of the case's arrays by name."""
    options = {**case.options, **options}
    if case.mask is not None:
        options["mask"] = case.mask
    return lambda arrays: attend(**arrays, **options)


def _with_gradients(attend, case):
    """Returns output and gradients as a function of the case's arrays by name."""

    def call(arrays):
        out, pull = jax.vjp(_outputs(attend, case), arrays)
        return out, pull(_cotangent(case, out))[0]

    return call


def _run(function, case):
    """Applies to the case's arrays; compiled as one unless the operations are compiled already."""
    function = function if case.shared else jax.jit(function)
    # On Explicit mesh axes JAX indexes no array outside a mesh's context; numpy has none.
    return jax.device_get(function(jax.tree.map(jnp.asarray, case.arrays)))


def _cotangent(case, out):
    expect(out.shape == case.cotangent.shape, f"the output has shape {out.shape}")
    return jnp.asarray(case.cotangent, out.dtype)


def _compare_output(out, case) -> None:
    expect(out.dtype == case.q.dtype, f"the output is {out.dtype} for {case.q.dtype} queries")
    _compare_shape(out, case.cotangent.shape, "output")
    out, expected = float64(out), case.expected[0]
    clean = case.clean & ~case.reads_nothing
    close(out[clean], expected[clean], "output", case.q.dtype)
    hidden = np.isfinite(out).all(-1) & np.isnan(expected).all(-1)
    expect(not hidden.any(), "a NaN that may be read is hidden")


def _compare_nothing(out, case) -> None:
    zero(float64(out)[case.reads_nothing], "the output of a query that reads nothing")


def _compare_gradients(actual, wanted, case) -> None:
    zero(actual["q"][case.reads_nothing], "the gradient of a query that reads nothing")
    if not case.clean.all():  # k, v and bias also learn from the queries that read the poison
        actual = {"q": actual["q"]}
    for name, gradient in actual.items():
        dtype = min(case.q.dtype, gradient.dtype, key=lambda dtype: dtype.itemsize)
        expected, what = wanted[name], f"gradient of {name}"
        _compare_shape(gradient, expected.shape, what)
        if name == "q":
            gradient, expected = gradient[case.clean], expected[case.clean]
        close(gradient, expected, what, dtype, ulps=8, least=0.1)
    if "k" in actual:
        unread = ~case.readable.any(axis=(-3, -2))
        zero(actual["k"][unread], "the gradient of a key nobody reads")
        zero(actual["v"][unread], "the gradient of a value nobody reads")


def _compare_shape(actual, shape, what) -> None:
    expect(actual.shape == shape, f"{what}: shape {actual.shape} where {shape} is expected")
