"""The forward and the backward pass of another library's attention, each alone, by its public function.

Such a function is differentiable as a whole, and what its backward kernel needs beside the operands has no
public name. So the program that JAX traces for both is gone through, and its forward kernel, the first
operation of a given name, is watched or given what is known already.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_vjp_call": "call_jaxpr"}
# From what would run the kernel, and the shapes of its results, the results.
_Forward = Callable[[Callable[[], list[Any]], Sequence[Any]], list[Any]]


def watched(kernel: str, function: Callable, *operands: Any) -> tuple[Any, list[Any]]:
    """Returns ``function(*operands)``, and its forward kernel's results when it is differentiated."""
    found: list[list[Any]] = []

    def watch(compute: Callable[[], list[Any]], shapes: Sequence[Any]) -> list[Any]:
        found.append(compute())
        return found[-1]

    out = _evaluate(kernel, watch, lambda *operands: jax.vjp(function, *operands)[0], *operands)
    return out, found[0]


def pulled(kernel: str, function: Callable, known: Callable, cotangent: Any, *operands: Any) -> Any:
    """Returns gradients of the operands; ``known`` gives the forward kernel's results, from their shapes."""

    def both(cotangent: Any, *operands: Any) -> Any:
        return jax.vjp(function, *operands)[1](cotangent)

    return _evaluate(kernel, lambda _, shapes: known(shapes), both, cotangent, *operands)


def _evaluate(kernel: str, forward: _Forward, call: Callable, *arguments: Any) -> Any:
    traced, shapes = jax.make_jaxpr(call, return_shape=True)(*arguments)
    results = _run(kernel, [forward], traced, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _run(kernel: str, forward: list[_Forward], traced: Any, arguments: list[Any]) -> list[Any]:
    values = dict(zip(traced.jaxpr.invars, arguments, strict=True))
    values |= dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in traced.jaxpr.eqns:
        given = [read(x) for x in equation.invars]

        def compute(equation: Any = equation, given: list[Any] = given) -> list[Any]:
            if equation.primitive.name in _CALLS:
                return _run(
                    kernel, forward, equation.params[_CALLS[equation.primitive.name]], given
                )
            parameters = equation.primitive.get_bind_params(equation.params)
            with jax.named_scope(str(equation.source_info.name_stack) or kernel):
                results = equation.primitive.bind(*given, **parameters)
            return results if equation.primitive.multiple_results else [results]

        if equation.primitive.name == kernel and forward:
            results = forward.pop()(compute, [x.aval for x in equation.outvars])
        else:
            results = compute()
        values |= dict(zip(equation.outvars, results, strict=True))
    return [read(x) for x in traced.jaxpr.outvars]
