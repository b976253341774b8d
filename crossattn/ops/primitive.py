"""Attention as one operation of a program: its kernel is chosen where the program is lowered.

Only there are the platform and the devices known, so that one traced function runs on, and exports to, CPU,
GPU and TPU with the best kernel of each, every device computing its own part. Differentiated in reverse
mode it is a second operation, whose kernel gets what the first one found; forward mode and second orders go
through "chunked" and "reference". ``jax.lax.platform_dependent`` would trace the kernels of all platforms
in every call, which takes six times as long, and ``jax.custom_vjp`` has no forward mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from crossattn import axes
from crossattn.ops import backends, derivative, platforms
from crossattn.ops.backends import Ran
from crossattn.ops.call import AttentionOutput, Call, Form, Names, named, taken_apart
from crossattn.ops.derivative import Derivative
from crossattn.ops.parallel import placement, spread
from crossattn.ops.parallel.placement import alike
from crossattn.ops.promotion import as_written, widened

_VALUES = 2  # the place of v among a call's arrays


@dataclass(frozen=True)
class Problem:
    """Static part of a call, known before the program runs.

    Attributes:
      form: the call without its arrays.
      rules: the table of ``crossattn.axes`` in force.
      lse: whether the log-sum-exp is returned.
      wide: whether the output is float32 at least.
      rows: whether what the backward pass needs is returned too.
    """

    form: Form
    rules: Any
    lse: bool
    wide: bool
    rows: bool = False

    @property
    def returned(self) -> int:
        """Number of results with a derivative: the output, and the log-sum-exp."""
        return 1 + self.lse

    def results(self, output: AttentionOutput) -> list[Any]:
        """Returns those results of a backend."""
        return [output.out, *([output.lse] if self.lse else [])]


def suits(call: Call) -> bool:
    """Returns whether a call can be left open until it is lowered."""
    return not (call.return_weights or call.dropout_key is not None or call.symbolic)


def attend(call: Call) -> Ran:
    """Binds the operation; returns the output, and the log-sum-exp where it is asked for."""
    arrays, form = taken_apart(call)
    rules = tuple(sorted(axes.rules().items()))
    problem = Problem(form, rules, call.return_lse, call.wide)
    results = _attend.bind(*alike(list(map(jnp.asarray, arrays))), problem=problem)
    return Ran(AttentionOutput(results[0], None, results[1] if problem.lse else None))


@as_written
def _run(*arrays: Any, problem: Problem) -> list[Any]:
    call = replace(problem.form.call(arrays), return_rows=problem.rows)
    with axes.use_rules(dict(problem.rules)):
        ran = spread.attend(backends.first_that_fits, placement.attended_on(arrays), call)
    backends.warn_where_slow(ran)
    results = problem.results(ran.attended)
    if problem.rows:
        shapes = _shapes(*map(jax.typeof, arrays), problem=problem)[len(results) :]
        results += ran.attended.rows or [jnp.zeros(x.shape, x.dtype) for x in shapes]
    return list(alike((*results, *arrays))[: len(results)])


def _shapes(*avals: Any, problem: Problem) -> list[Any]:
    """Returns shapes of output [*B T N Hv], log-sum-exp, peak and sum of the rows, [*B N T] all three."""
    q, _, v, *_ = avals
    meshed = next((x for x in avals if not x.sharding.mesh.empty), q)

    def shaped(shape: Sequence[int], dtype: Any) -> Any:
        sharding = meshed.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
        return q.update(shape=tuple(shape), dtype=dtype, sharding=sharding, weak_type=False)

    wide, rows = widened(q.dtype), (*q.shape[:-3], q.shape[-2], q.shape[-3])
    results = [shaped((*q.shape[:-1], v.shape[-1]), wide if problem.wide else q.dtype)]
    results += [shaped(rows, jnp.dtype("float32"))] * problem.lse
    return results + [shaped(rows, wide)] * (2 * problem.rows)


def _differentiate(primals, tangents, *, problem: Problem):
    results = _attend.bind(*primals, problem=replace(problem, rows=True))
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))
    moving = tuple(i for i in moving if jnp.issubdtype(primals[i].dtype, jnp.inexact))
    moved = derivative.linear(
        _derivative(problem, moving),
        (list(primals), list(results)),
        [tangents[i] for i in moving],
        results[: problem.returned],
    )
    results = results if problem.rows else results[: problem.returned]
    still = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results[problem.returned :]]
    return results, [*moved, *still]


def _transpose(cotangents, *operands, problem: Problem):
    """Transposes in v, in which alone attention is linear; any point will do, so 0."""
    if [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)] != [_VALUES]:
        raise NotImplementedError("attend is linear in v alone, so it is transposed in no other.")

    def of_values(v: Any) -> list[Any]:
        return _attend.bind(*_with(operands, [_VALUES], [v]), problem=problem)

    _, pull = jax.vjp(of_values, ad.zeros_like_aval(operands[_VALUES].aval))
    [moved] = pull(list(map(ad.instantiate_zeros, cotangents)))
    return [moved if i == _VALUES else None for i in range(len(operands))]


def _derivative(problem: Problem, moving: tuple[int, ...]) -> Derivative:
    """Returns the derivative in the moving operands; ``_gradients`` is its backward pass."""

    def pushed(name: str, residuals: Any, tangents: Any) -> Any:
        arrays, _ = residuals
        points = tuple(arrays[i] for i in moving)
        return jax.jvp(_plain(problem, arrays, moving, name), points, tuple(tangents))[1]

    def forward(residuals: Any, tangents: Any) -> Any:
        q, k, *_ = residuals[0]
        small = backends.get("chunked").unsuited(q, k) is not None
        return pushed("reference" if small else "chunked", residuals, tangents)

    def backward(residuals: Any, cotangents: Any) -> Any:
        arrays, results = residuals
        operands = alike((*arrays, *results, *cotangents))
        return _gradients.bind(*operands, problem=problem, moving=moving)

    return Derivative(forward, backward, partial(pushed, "reference"))


def _plain(problem: Problem, arrays: Any, moving: tuple[int, ...], backend: str) -> Any:
    """Returns the function of some operands that JAX differentiates."""

    def call(*points: Any) -> list[Any]:
        given = problem.form.call(_with(arrays, moving, points))
        return problem.results(backends.run(backend, given))

    return call


def _with(arrays: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    changed = dict(zip(places, values, strict=True))
    return [changed.get(i, x) for i, x in enumerate(arrays)]


def _apart(operands: Sequence[Any], problem: Problem) -> tuple[list, list, list]:
    """Splits operands into those of the call, its results, and the cotangents."""
    returned, operands = problem.returned, list(operands)
    count = len(operands) - 2 * returned - 2
    return operands[:count], operands[count:-returned], operands[-returned:]


@as_written
def _run_back(*operands: Any, problem: Problem, moving: tuple[int, ...]) -> list[Any]:
    arrays, results, cotangents = _apart(operands, problem)
    known = results[0], *results[-2:]
    with axes.use_rules(dict(problem.rules)):
        mesh = placement.attended_on(arrays)
        if mesh is not None and "T" in spread.split_of(mesh, *arrays[:3]).axes:
            # Keys and values that devices gather are gathered anew, when the cotangents are there: neither
            # kept since the forward pass, nor all gathered as soon as it ends.
            arrays, cotangents = jax.lax.optimization_barrier((arrays, cotangents))

        def forward(*points: Any) -> list[Any]:
            call = problem.form.call(_with(arrays, moving, points))
            ran = spread.attend(backends.first_that_fits, mesh, replace(call, known=known))
            backends.warn_where_slow(ran)
            return problem.results(ran.attended)

        points = [arrays[i] for i in moving]
        _, pull = jax.vjp(forward, *alike((*points, *operands))[: len(points)])
        gradients = pull(cotangents)
    return list(alike((*gradients, *operands))[: len(moving)])


def _shapes_back(*avals: Any, problem: Problem, moving: tuple[int, ...]) -> list[Any]:
    return [avals[i].update(weak_type=False) for i in moving]


def _differentiate_back(primals, tangents, *, problem: Problem, moving: tuple[int, ...]):
    """Differentiates through the reference: there output and rows follow from the operands."""
    arrays, _, cotangents = _apart(primals, problem)
    count, points = len(moving), [arrays[i] for i in moving]

    def first_order(*given: Any) -> list[Any]:
        plain = _plain(problem, arrays, moving, "reference")
        return list(jax.vjp(plain, *given[:count])[1](list(given[count:])))

    given = [tangents[i] for i in moving] + list(tangents[-problem.returned :])
    given = [ad.instantiate_zeros(t) for t in given]
    # Without the checkpoint a backward pass over this would hold the matrix until it runs.
    moved = jax.jvp(jax.checkpoint(first_order), (*points, *cotangents), tuple(given))[1]
    return _gradients.bind(*primals, problem=problem, moving=moving), moved


def _batch(axis, operands, mapped, *, problem: Problem):
    names = problem.form.names(_unmapped(operands, mapped))
    return _batched(_attend, _run, axis, operands, mapped, names, problem=problem)


def _batch_back(axis, operands, mapped, *, problem: Problem, moving: tuple[int, ...]):
    arrays, results, cotangents = _apart(_unmapped(operands, mapped), problem)
    out = named(arrays[0], "T", "N", None)
    rows, names = Names((*out[:-3], "N", "T")), problem.form.names(arrays)
    for given in (results, cotangents):
        names += [out, *[rows] * (len(given) - 1)]
    own = dict(problem=problem, moving=moving)
    return _batched(_gradients, _run_back, axis, operands, mapped, names, **own)


def _unmapped(operands: Sequence[Any], mapped: Sequence[int | None]) -> list[Any]:
    """Returns the shapes of one member of the mapped axis."""
    avals = (jax.typeof(x) for x in operands)
    pairs = zip(avals, mapped, strict=True)
    return [
        x if a is None else jax.ShapeDtypeStruct((*x.shape[:a], *x.shape[a + 1 :]), x.dtype)
        for x, a in pairs
    ]


def _batched(operation: Any, run: Any, axis: Any, operands, mapped, names, **static: Any):
    """Adds a mapped axis as the first batch axis, so that a split by it stays."""
    if any(a is not None and n is None for a, n in zip(mapped, names, strict=True)):
        results = derivative.vmap(axis, partial(run, **static), list(mapped))(*operands)
        return results, [0] * len(results)
    lead = max(len(n) - _inner(n) for n in names if n is not None)
    moved = [
        x if n is None else _first_axis(x, a, lead, _inner(n), axis.size)
        for x, a, n in zip(operands, mapped, names, strict=True)
    ]
    problem = static["problem"]
    rules = tuple(rule for rule in problem.rules if rule[0] != "mapped")
    if axis.spmd_name is not None:  # what it says is of the outermost batch axis, this one
        rules = (*rules, ("mapped", tuple(axis.spmd_name)))
    results = operation.bind(*moved, **static | {"problem": replace(problem, rules=rules)})
    return results, [0] * len(results)


def _inner(names: Names) -> int:
    """Returns the number of axes after those of the batch."""
    return sum(not isinstance(name, int) for name in names)


def _first_axis(x: Any, axis: int | None, lead: int, inner: int, size: int) -> Any:
    """Returns [size, *1s, *own batch axes, *inner]; unmapped numbers have gradients for each member."""
    x = x[None] if axis is None else jnp.moveaxis(x, axis, 0)
    ones = (1,) * (lead - (x.ndim - 1 - inner))
    x = x.reshape(x.shape[0], *ones, *x.shape[1:])
    if axis is None and jnp.issubdtype(x.dtype, jnp.inexact):
        x = jnp.broadcast_to(x, (size, *x.shape[1:]))
    return x


_attend = platforms.operation("attend", _run, _shapes, _differentiate, _batch, _transpose)
_gradients = platforms.operation(
    "attend_gradients", _run_back, _shapes_back, _differentiate_back, _batch_back
)
