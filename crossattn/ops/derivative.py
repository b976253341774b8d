"""Functions with derivatives of their own: forward mode by plain JAX, reverse mode by a kernel.

``jax.custom_vjp`` takes forward mode away, and ``jax.custom_jvp`` makes the backward pass by transposing
what forward mode computes, so never a fused kernel. Here ``call`` is ``custom_jvp``, and ``linear`` gives
its rule tangents that have a backward pass beside. ``jax.custom_derivatives.linear_call`` is ``linear``
without vmap and without a second derivative; and ``jax.custom_jvp`` loses its rule inside ``lax.scan``
once that was differentiated, which a kernel that JAX cannot look into does not survive.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from crossattn.ops import platforms
from crossattn.ops.promotion import as_written


def call(
    name: str, run: Callable[..., Any], rule: Callable[[Any, Any], Any], *operands: Any
) -> Any:
    """Computes ``run(*operands)``, differentiated by a rule.

    Args:
      name: what a reader of a jaxpr sees.
      run: a function of pytrees of arrays, which gives a tuple.
      rule: (operands, their tangents) -> (results, tangents of the first of them); those of the others
        are 0. The tangent of what is not a floating-point number is None.
      operands: of ``run``.
    """
    leaves, structure = jax.tree.flatten(operands)
    trees = []

    # JAX may trace them later, when what the caller set is no longer what this package is written for.
    @as_written
    def flat_run(*leaves):
        results, tree = jax.tree.flatten(run(*structure.unflatten(leaves)))
        trees.append(tree)
        return results

    @as_written
    def flat_rule(primals, tangents):
        results, moved = rule(structure.unflatten(primals), structure.unflatten(tangents))
        results, tree = jax.tree.flatten(results)
        trees.append(tree)
        return results, jax.tree.leaves(moved)

    results = _call.bind(*leaves, name=name, run=flat_run, rule=flat_rule)
    if not trees:  # JAX has taken it from a cache
        jax.eval_shape(flat_run, *leaves)
    return trees[-1].unflatten(results)


def _run(*leaves, name, run, rule):
    return run(*leaves)


def _call_shapes(*avals, name, run, rule):
    return jax.make_jaxpr(run)(*avals).out_avals


def _call_differentiate(primals, tangents, *, name, run, rule):
    wanted = [jnp.issubdtype(x.dtype, jnp.inexact) for x in primals]
    moving = [ad.instantiate_zeros(t) if w else None for t, w in zip(tangents, wanted, strict=True)]
    results, moved = rule(list(primals), moving)
    still = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results[len(moved) :]]
    return results, [*moved, *still]


def vmap(axis: Any, function: Callable, axes: Any) -> Callable:
    """Maps like ``jax.vmap`` in the rule of a primitive, with the axis' name and mesh axes."""
    return jax.vmap(function, axes, axis_name=axis.name, spmd_axis_name=axis.spmd_name)


def _call_batch(axis, arguments, axes, *, name, run, rule):
    axes = list(axes)

    def mapped_rule(primals, tangents):
        own = [None if t is None else a for a, t in zip(axes, tangents, strict=True)]
        return vmap(axis, rule, (axes, own))(primals, tangents)

    results = _call.bind(*arguments, name=name, run=vmap(axis, run, axes), rule=mapped_rule)
    return results, [0] * len(results)


_call = platforms.operation("attention", _run, _call_shapes, _call_differentiate, _call_batch)


class Derivative(NamedTuple):
    """Derivative of a function at a point, given by residuals, in three forms.

    Attributes:
      forward: (residuals, tangents) -> tangents of the results; nothing transposes it.
      backward: (residuals, cotangents of the results) -> cotangents. Its own derivative is for JAX to
        find, or for a rule that it brings.
      smooth: as ``forward``, by operations that JAX differentiates in either mode, for second orders.
    """

    forward: Callable[[Any, Any], Any]
    backward: Callable[[Any, Any], Any]
    smooth: Callable[[Any, Any], Any]


def linear(derivative: Derivative, residuals: Any, tangents: Any, like: Any) -> Any:
    """Computes ``derivative.forward(residuals, tangents)``; ``like`` are results whose tangents these are."""
    known, known_tree = jax.tree.flatten(residuals)
    moving, moving_tree = jax.tree.flatten(tangents)
    results, tree = jax.tree.flatten(like)

    def flat(function, second_tree):
        @as_written
        def call(known, second):
            outputs = function(known_tree.unflatten(known), second_tree.unflatten(second))
            return jax.tree.leaves(outputs)

        return call

    flattened = Derivative(
        flat(derivative.forward, moving_tree),
        flat(derivative.backward, tree),
        flat(derivative.smooth, moving_tree),
    )
    avals = tuple(jax.typeof(x) for x in results)
    outputs = _linear.bind(*known, *moving, derivative=flattened, count=len(known), avals=avals)
    return tree.unflatten(outputs)


def _evaluate(*arguments, derivative, count, avals):
    return derivative.forward(list(arguments[:count]), list(arguments[count:]))


def _shapes(*arguments, derivative, count, avals):
    return avals


def _differentiate(primals, tangents, *, derivative, count, avals):
    """Differentiates in the tangents, where the map is linear, and in residuals by its smooth form."""
    known, moving = list(primals[:count]), list(primals[count:])
    options = dict(derivative=derivative, count=count, avals=avals)
    results = _linear.bind(*primals, **options)
    terms = []
    if not all(_is_zero(t) for t in tangents[count:]):
        terms.append(_linear.bind(*known, *map(ad.instantiate_zeros, tangents[count:]), **options))
    changing = [i for i in range(count) if not _is_zero(tangents[i])]
    if changing:

        def at(*values):
            whole = list(known)
            for i, value in zip(changing, values, strict=True):
                whole[i] = value
            return derivative.smooth(whole, moving)

        points = [known[i] for i in changing]
        # Without the checkpoint a backward pass over this would hold matrices [T, S] until it runs.
        _, change = jax.jvp(jax.checkpoint(at), points, [tangents[i] for i in changing])
        terms.append(change)
    if not terms:
        return results, [ad.Zero(aval) for aval in avals]
    return results, [sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True)]


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def _transpose(cotangents, *arguments, derivative, count, avals):
    known, asked = list(arguments[:count]), arguments[count:]
    if all(isinstance(ct, ad.Zero) for ct in cotangents):
        return [None] * len(arguments)
    gradients = derivative.backward(known, [ad.instantiate_zeros(ct) for ct in cotangents])
    given = [
        g if ad.is_undefined_primal(x) else None for g, x in zip(gradients, asked, strict=True)
    ]
    return [None] * count + given


def _batch(axis, arguments, axes, *, derivative, count, avals):
    """Gives every tangent the mapped axis, so that no cotangent must be summed over it."""
    moved = [
        x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(arguments, axes, strict=True)
    ]
    known = [None if a is None else 0 for a in axes[:count]]
    for i in range(count, len(moved)):
        if axes[i] is None:
            moved[i] = jnp.broadcast_to(moved[i], (axis.size, *moved[i].shape))
    mapped = Derivative(*(vmap(axis, function, (known, 0)) for function in derivative))
    avals = tuple(_mapped(aval, axis.size, moved[count]) for aval in avals)
    results = _linear.bind(*moved, derivative=mapped, count=count, avals=avals)
    return results, [0] * len(results)


def _mapped(aval: Any, size: int, like: Any) -> Any:
    """Returns the shape with the mapped axis, laid out over a mesh as that axis of ``like`` is."""
    sharding = aval.sharding
    first, *_ = jax.typeof(like).sharding.spec
    sharding = sharding.update(spec=PartitionSpec(first, *sharding.spec))
    return aval.update(shape=(size, *aval.shape), sharding=sharding)


_linear = platforms.operation(
    "attention_derivative", _evaluate, _shapes, _differentiate, _batch, _transpose
)
