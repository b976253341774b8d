"""Attention as one operation of a program: its kernel is chosen where the program is lowered.

Only there are the platform and the devices known, so that one traced function runs on, and exports to, CPU,
GPU and TPU with the best kernel of each, every device computing its own part. Differentiated in reverse
mode it is a second operation, whose kernel gets what the first one found; forward mode and second orders go
through "chunked" and "reference".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from crossattn import axes
from crossattn.ops import choice, derivative, platforms
from crossattn.ops.backends import AttentionOutput, chunked, reference
from crossattn.ops.blockwise import blocks
from crossattn.ops.derivative import Derivative
from crossattn.ops.masks import Mask, slices
from crossattn.ops.masks.slices import Form
from crossattn.ops.parallel import placement, spread
from crossattn.ops.parallel.placement import Names, named
from crossattn.ops.promotion import as_written

_TRACED = ("bias", "scale", "softcap")


@dataclass(frozen=True)
class Problem:
    """What of a call is known before the program runs.

    Attributes:
      form: of the tree of operands.
      mask: the mask without its arrays.
      numbers: options that are plain numbers.
      lse: whether the log-sum-exp is returned.
      rows: whether what the backward pass needs is returned too.
      rules: the table of ``crossattn.axes`` in force.
      wide: whether the output is float32 at least, of a part that is yet to be merged.
    """

    form: Any
    mask: Form
    numbers: tuple[tuple[str, Any], ...]
    lse: bool
    rows: bool
    rules: Any
    wide: bool = False

    def unpack(self, arrays: Sequence[Any]) -> tuple[Any, Any, Any, Mask | None, dict[str, Any]]:
        """The arguments of a backend."""
        given = self.form.unflatten(arrays)
        options = {**dict.fromkeys(_TRACED), **dict(self.numbers)}
        options |= {name: given[name] for name in _TRACED if name in given}
        options |= dict(dropout_rate=0.0, dropout_key=None)
        options |= dict(return_weights=False, return_lse=self.lse)
        return given["q"], given["k"], given["v"], self.mask.mask(given["mask"]), options

    def gathers(self, arrays: Sequence[Any]) -> bool:
        """Whether devices that hold a part of the length each get all keys and values."""
        given = self.form.unflatten(arrays)
        with axes.use_rules(dict(self.rules)):
            mesh = placement.attended_on(arrays)
            return mesh is not None and "T" in spread.split_of(mesh, *map(given.get, "qkv")).axes

    def names(self, arrays: Sequence[Any]) -> list[Names]:
        """What the axes of each operand are."""
        given = self.form.unflatten(arrays)
        axis_names: dict[str, Any] = {
            name: named(given[name], "S", "N", None) for name in ("k", "v")
        }
        axis_names |= dict(q=named(given["q"], "T", "N", None), scale=None, softcap=None)
        axis_names["mask"] = [
            named(x, *inner) for x, inner in zip(given["mask"], self.mask.inner, strict=True)
        ]
        if "bias" in given:
            axis_names["bias"] = named(given["bias"], "N", "T", "S")
        axis_names = {name: axis_names[name] for name in given}
        return jax.tree.leaves(axis_names, is_leaf=lambda x: x is None or isinstance(x, Names))


def suits(q: Any, k: Any, options: dict[str, Any]) -> bool:
    """Whether a call can be left open until it is lowered."""
    if options["return_weights"] or options["dropout_key"] is not None:
        return False
    return not blocks.is_symbolic(*q.shape, *k.shape)


def attend(
    q, k, v, mask: Mask | None, options: dict[str, Any], wide: bool = False
) -> AttentionOutput:
    """Output, and the log-sum-exp where it is asked for; for ``wide``, ``choice.first_that_fits``."""
    terms, form = slices.taken_apart(mask)
    given = dict(q=q, k=k, v=v, mask=terms)
    given |= {name: options[name] for name in _TRACED if hasattr(options[name], "dtype")}
    plain = tuple((name, options[name]) for name in _TRACED if name not in given)
    arrays, structure = jax.tree.flatten(given)
    rules = tuple(sorted(axes.rules().items()))
    problem = Problem(structure, form, plain, options["return_lse"], False, rules, wide)
    results = _attend.bind(*blocks.alike(list(map(jnp.asarray, arrays))), problem=problem)
    return AttentionOutput(results[0], None, results[1] if problem.lse else None)


def _compute(problem: Problem, arrays: Sequence[Any], known: Any = None) -> AttentionOutput:
    """By the first backend that fits, each device its part."""
    q, k, v, mask, options = problem.unpack(arrays)
    options |= dict(return_rows=problem.rows, known=known)
    with axes.use_rules(dict(problem.rules)):
        if placement.attended_on((q, k, v, mask, options)) is None:
            ran = choice.first_that_fits(None, q, k, v, mask, options, problem.wide)
        else:
            attended, tried = spread.attend(_part, q, k, v, mask, options, problem.wide)
            ran = choice.DispatchResult(attended, tried.backend, tried.skipped)
    choice.warn_where_slow(ran)
    return ran.attended


def _part(q, k, v, mask, options: dict, wide: bool) -> tuple[AttentionOutput, spread.Tried]:
    ran = choice.first_that_fits(None, q, k, v, mask, options, wide)
    attended = ran.attended
    if options["return_rows"] and attended.rows is None:
        # Of a backend that does not reuse them; every device has some.
        nothing = jnp.zeros((*q.shape[:-3], q.shape[-2], q.shape[-3]), _wide(q))
        attended = attended._replace(rows=tuple(blocks.alike((nothing, nothing, q))[:2]))
    return attended, spread.Tried(ran.backend, ran.skipped)


def _wide(x: Any) -> Any:
    return choice.widened(x.dtype)


@as_written
def _run(*arrays: Any, problem: Problem) -> list[Any]:
    output = _compute(problem, arrays)
    results = [output.out, *([output.lse] if problem.lse else [])]
    if problem.rows:
        shapes = _shapes(*map(jax.typeof, arrays), problem=problem)[len(results) :]
        nothing = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        results += nothing if output.rows is None else output.rows
    return list(blocks.alike((*results, *arrays))[: len(results)])


def _run_eagerly(*arrays: Any, problem: Problem) -> list[Any]:
    with platforms.lowered_for(platforms.of_arrays(arrays)):
        return _run(*arrays, problem=problem)


def _shapes(*avals: Any, problem: Problem) -> list[Any]:
    """Output [*B T N Hv]; log-sum-exp; of the rows of logits the peak and the sum, [*B N T] all three."""
    given = problem.form.unflatten(avals)
    q, v = given["q"], given["v"]
    meshed = next((x for x in avals if not x.sharding.mesh.empty), q)

    def shaped(shape: Sequence[int], dtype: Any) -> Any:
        sharding = meshed.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
        return q.update(shape=tuple(shape), dtype=dtype, sharding=sharding, weak_type=False)

    rows = *q.shape[:-3], q.shape[-2], q.shape[-3]
    results = [shaped((*q.shape[:-1], v.shape[-1]), _wide(q) if problem.wide else q.dtype)]
    results += [shaped(rows, jnp.dtype("float32"))] * problem.lse
    return results + [shaped(rows, _wide(q))] * (2 * problem.rows)


def _differentiate(primals, tangents, *, problem: Problem):
    results = _attend.bind(*primals, problem=replace(problem, rows=True))
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))
    moving = tuple(i for i in moving if jnp.issubdtype(primals[i].dtype, jnp.inexact))
    returned = 1 + problem.lse
    moved = derivative.linear(
        _derivative(problem, moving),
        (list(primals), list(results)),
        [tangents[i] for i in moving],
        results[:returned],
    )
    results = results if problem.rows else results[:returned]
    still = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results[returned:]]
    return results, [*moved, *still]


def _transpose(cotangents, *operands, problem: Problem):
    """``jax.linear_transpose`` in the values, which alone it is linear in; 0 are as good as any."""
    value = problem.form.unflatten(range(len(operands)))["v"]
    if [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)] != [value]:
        raise NotImplementedError("attend is linear in v alone, so it is transposed in no other.")

    def of_values(v: Any) -> list[Any]:
        return _attend.bind(*_with(operands, [value], [v]), problem=problem)

    _, pull = jax.vjp(of_values, ad.zeros_like_aval(operands[value].aval))
    [moved] = pull(list(map(ad.instantiate_zeros, cotangents)))
    return [moved if i == value else None for i in range(len(operands))]


def _derivative(problem: Problem, moving: tuple[int, ...]) -> Derivative:
    """Of output and log-sum-exp in those operands; ``_gradients`` is its backward pass."""

    def pushed(module: Any, residuals: Any, tangents: Any) -> Any:
        arrays, _ = residuals
        points = tuple(arrays[i] for i in moving)
        return jax.jvp(_plain(problem, arrays, moving, module), points, tuple(tangents))[1]

    def forward(residuals: Any, tangents: Any) -> Any:
        given = problem.form.unflatten(residuals[0])
        small = chunked.unsuited(given["q"], given["k"]) is not None
        module = reference if small else chunked
        return pushed(module, residuals, tangents)

    def backward(residuals: Any, cotangents: Any) -> Any:
        arrays, results = residuals
        operands = blocks.alike((*arrays, *results, *cotangents))
        return _gradients.bind(*operands, problem=problem, moving=moving)

    return Derivative(forward, backward, partial(pushed, reference))


def _plain(problem: Problem, arrays: Any, moving: tuple[int, ...], module: Any) -> Any:
    """Output and log-sum-exp as a function of some operands, by operations that JAX differentiates."""

    def call(*points: Any) -> list[Any]:
        q, k, v, mask, options = problem.unpack(_with(arrays, moving, points))
        output = choice.call(module, q, k, v, mask, options, problem.wide)
        return [output.out, *([output.lse] if problem.lse else [])]

    return call


def _with(arrays: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    changed = dict(zip(places, values, strict=True))
    return [changed.get(i, x) for i, x in enumerate(arrays)]


def _taken_apart(operands: Sequence[Any], problem: Problem) -> tuple[list, list, list]:
    """Operands of the call, what it gave, and the cotangents of output and log-sum-exp."""
    returned = 1 + problem.lse
    count = len(operands) - 2 * returned - 2
    operands = list(operands)
    return operands[:count], operands[count:-returned], operands[-returned:]


@as_written
def _run_back(*operands: Any, problem: Problem, moving: tuple[int, ...]) -> list[Any]:
    arrays, results, cotangents = _taken_apart(operands, problem)
    known = results[0], *results[-2:]
    if problem.gathers(arrays):
        # Keys and values that devices gather are gathered anew, when the cotangents are there: neither kept
        # since the forward pass, nor all gathered as soon as it ends.
        arrays, cotangents = jax.lax.optimization_barrier((arrays, cotangents))

    def forward(*points: Any) -> list[Any]:
        given = _with(arrays, moving, points)
        attended = _compute(replace(problem, rows=False), given, known)
        return [attended.out, *([attended.lse] if problem.lse else [])]

    points = [arrays[i] for i in moving]
    _, pull = jax.vjp(forward, *blocks.alike((*points, *operands))[: len(points)])
    gradients = pull(cotangents)
    return list(blocks.alike((*gradients, *operands))[: len(moving)])


def _run_back_eagerly(*operands: Any, problem: Problem, moving: tuple[int, ...]) -> list[Any]:
    with platforms.lowered_for(platforms.of_arrays(operands)):
        return _run_back(*operands, problem=problem, moving=moving)


def _shapes_back(*avals: Any, problem: Problem, moving: tuple[int, ...]) -> list[Any]:
    return [avals[i].update(weak_type=False) for i in moving]


def _differentiate_back(primals, tangents, *, problem: Problem, moving: tuple[int, ...]):
    """Second order, through the reference: there output and rows follow from the operands."""
    arrays, results, cotangents = _taken_apart(primals, problem)
    count, points = len(moving), [arrays[i] for i in moving]

    def first_order(*given: Any) -> list[Any]:
        plain = _plain(problem, arrays, moving, reference)
        return list(jax.vjp(plain, *given[:count])[1](list(given[count:])))

    given = [tangents[i] for i in moving] + list(tangents[len(arrays) + len(results) :])
    given = [ad.instantiate_zeros(t) for t in given]
    # Without the checkpoint a backward pass over this would hold the matrix until it runs.
    moved = jax.jvp(jax.checkpoint(first_order), (*points, *cotangents), tuple(given))[1]
    return _gradients.bind(*primals, problem=problem, moving=moving), moved


def _batch(axis, arguments, mapped, *, problem: Problem):
    names = problem.names(_unmapped(arguments, mapped))
    return _batched(_attend, _run, axis, arguments, mapped, names, problem=problem)


def _batch_back(axis, arguments, mapped, *, problem: Problem, moving: tuple[int, ...]):
    arrays, results, cotangents = _taken_apart(_unmapped(arguments, mapped), problem)
    names = problem.names(arrays)
    rows = Names((*names[_first_of(problem)][:-3], "N", "T"))
    out = Names((*rows[:-2], "T", "N", None))
    names = [*names, out, *[rows] * (len(results) - 1), out, *[rows] * (len(cotangents) - 1)]
    own = dict(problem=problem, moving=moving)
    return _batched(_gradients, _run_back, axis, arguments, mapped, names, **own)


def _first_of(problem: Problem) -> int:
    """Where the queries are among the operands."""
    count = problem.form.num_leaves
    return problem.form.unflatten(range(count))["q"]


def _unmapped(arguments, mapped) -> list[Any]:
    """The shapes that the operation is written for."""

    def without(x: Any, axis: int | None) -> Any:
        shape = [n for i, n in enumerate(x.shape) if i != axis]
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return [without(x, axis) for x, axis in zip(arguments, mapped, strict=True)]


def _batched(
    primitive: Primitive, run: Any, axis: Any, arguments, mapped, names: list[Any], **static: Any
):
    """A mapped axis is one more batch axis, the first: what is split by it stays so."""
    if all(a is None for a in mapped):
        results = primitive.bind(*arguments, **static)
        return results, [None] * len(results)
    if any(a is not None and n is None for a, n in zip(mapped, names, strict=True)):
        results = derivative.vmap(axis, partial(run, **static), list(mapped))(*arguments)
        return results, [0] * len(results)
    lead = max(len(n) - len(_inner(n)) for n in names if n is not None)
    moved = [
        x if n is None else _first_axis(x, a, lead, len(_inner(n)), axis.size)
        for x, a, n in zip(arguments, mapped, names, strict=True)
    ]
    problem = replace(static["problem"], rules=_with_mapped(static["problem"].rules, axis))
    results = primitive.bind(*moved, **static | {"problem": problem})
    return results, [0] * len(results)


def _with_mapped(rules: Any, axis: Any) -> Any:
    """The table with what ``spmd_axis_name`` says of the outermost batch axis, this one."""
    others = tuple(rule for rule in rules if rule[0] != "mapped")
    return others if axis.spmd_name is None else (*others, ("mapped", tuple(axis.spmd_name)))


def _inner(names: Names) -> tuple:
    return tuple(n for n in names if not isinstance(n, int))


def _first_axis(x: Any, axis: int | None, lead: int, inner: int, size: int) -> Any:
    """[size, *1s, *own batch axes, *inner]; gradients of what is not mapped are each member's own."""
    x = x[None] if axis is None else jnp.moveaxis(x, axis, 0)
    ones = (1,) * (lead - (x.ndim - 1 - inner))
    x = x.reshape(x.shape[0], *ones, *x.shape[1:])
    if axis is None and jnp.issubdtype(x.dtype, jnp.inexact):
        x = jnp.broadcast_to(x, (size, *x.shape[1:]))
    return x


def _primitive(
    name: str, run: Callable, eagerly: Callable, shapes: Callable, jvp: Callable, batch: Callable
) -> Primitive:
    """An operation of several results, and what JAX asks of one."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(eagerly)
    primitive.def_abstract_eval(shapes)
    ad.primitive_jvps[primitive] = jvp
    batching.fancy_primitive_batchers[primitive] = batch
    platforms.register(primitive, run)
    return primitive


_attend = _primitive("attend", _run, _run_eagerly, _shapes, _differentiate, _batch)
ad.primitive_transposes[_attend] = _transpose
_gradients = _primitive(
    "attend_gradients", _run_back, _run_back_eagerly, _shapes_back, _differentiate_back, _batch_back
)

__all__ = ["attend", "suits"]
