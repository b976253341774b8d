"""Target of a program's lowering: "cpu", "gpu" or "tpu", one device or several.

While code is traced nobody knows: ``jax.export`` and ahead-of-time compilation lower for other platforms
than this machine's. Attention chooses its kernel inside ``lowered_for``, where it is known.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# Part of the key of jit's caches: what was traced for one platform does not serve another.
_target = jax.make_user_context(None)
_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


class Target(NamedTuple):
    """Platform of a program, and whether it has one device."""

    platform: str
    alone: bool


def platform() -> str:
    """Returns the platform that is lowered for; elsewhere that of JAX's default backend."""
    return jax.default_backend() if _target.value is None else _target.value.platform


def one_device() -> bool:
    """Returns whether arrays are one device's own: the only one, or ``shard_map`` is over all mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names and set(mesh.manual_axes) == set(mesh.axis_names):
        return True
    return jax.device_count() == 1 if _target.value is None else _target.value.alone


def lowered_for(target: Target) -> contextlib.AbstractContextManager[None]:
    """Returns a context inside which code is traced for a target."""
    return _target(target)


def target_of(arrays: Sequence[Any]) -> Target:
    """Returns the target of the current lowering; elsewhere that of a call on these arrays."""
    return of_arrays(arrays) if _target.value is None else _target.value


def of_arrays(arrays: Sequence[Any]) -> Target:
    """Returns the target of a call on concrete arrays; shapes lie on one device."""
    concrete = [
        x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    ]
    devices = {d for x in concrete for d in x.devices()}
    platform = next(iter(devices)).platform if devices else jax.default_backend()
    return Target(_ALIASES.get(platform, platform), len(devices) < 2)


def operation(
    name: str,
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    differentiate: Callable[..., Any],
    batch: Callable[..., Any],
    transpose: Callable[..., Any] | None = None,
) -> Primitive:
    """Makes an operation of a program, traced for each platform that the program is lowered for.

    Args:
      name: what a reader of a jaxpr sees.
      run: what it computes, a list, of its operands and parameters.
      shapes: of the results, and so on: what JAX asks of a primitive.
      differentiate: its rule of ``jax.jvp``.
      batch: of ``jax.vmap``, which is told of the mapped axis.
      transpose: of ``jax.linear_transpose``, where it has one.
    """

    def eagerly(*operands: Any, **parameters: Any) -> Any:
        with lowered_for(of_arrays(operands)):
            return run(*operands, **parameters)

    def batched(axis: Any, operands: Any, axes: Any, **parameters: Any) -> Any:
        if any(a is not None for a in axes):
            return batch(axis, operands, axes, **parameters)
        results = primitive.bind(*operands, **parameters)
        return results, [None] * len(results)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(eagerly)
    primitive.def_abstract_eval(shapes)
    ad.primitive_jvps[primitive] = differentiate
    batching.fancy_primitive_batchers[primitive] = batched
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    for platform in ("cpu", "tpu", "cuda", "rocm"):
        mlir.register_lowering(primitive, _lowering(run, platform), platform=platform)
    mlir.register_lowering(primitive, _lowering(run, None))
    return primitive


def _lowering(run: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """Returns the rule of a platform, or of any; JAX calls one for each that is lowered for."""
    lower = mlir.lower_fun(run, multiple_results=True)

    def rule(context: Any, /, *operands: Any, **parameters: Any) -> Any:
        module = context.module_context
        platform = name or (context.platforms or module.platforms)[0]
        target = Target(_ALIASES.get(platform, platform), _alone(module.axis_context))
        with lowered_for(target):
            return lower(context, *operands, **parameters)

    return rule


def _alone(axes: Any) -> bool:
    """Returns whether a program of this axis context has one device, or each device only its own part."""
    count = getattr(axes, "num_devices", None)
    if count is None:
        mesh = axes.mesh
        return mesh.size == 1 or set(axes.manual_axes) == set(mesh.axis_names)
    return count == 1
