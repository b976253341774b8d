"""Modules as pure functions: parameters in a plain nested dict, ``init`` and ``apply``.

A *build* is a function from ``nnx.Rngs`` to a module, for example
``lambda rngs: Transformer(config, rngs=rngs)``. ``jax.jit``, ``jax.value_and_grad``, optax and Orbax take
the dicts as they are, safetensors flat ones (given nested ones it destroys them)::

    safetensors.flax.save_file(flatten(params), "model.safetensors")
    params = nest(safetensors.flax.load_file("model.safetensors"))

Linen code bridges a module::

    from flax import nnx
    attention = nnx.bridge.ToLinen(xa.nn.MultiHeadAttention, args=(64,), kwargs={"num_heads": 4})
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from crossattn.types import Array, Axes, Key, Params, PyTree

Build = Callable[[nnx.Rngs], nnx.Module]


class Constant(nnx.Variable):
    """A checkpoint's weight that is not trained, such as Whisper's sinusoids.

    It is saved among the parameters. ``nnx.grad`` and ``nnx.Optimizer`` skip it, ``trainable`` is False for
    it, and its first logical axis is "constant", so that ``train.optim`` does not decay it.
    """


def init(build: Build, key: Key[Array, ""]) -> Params:
    """Initialises the parameters of the module that ``build`` makes, as a nested dict.

    Raises:
      TypeError: build is no function, but a module or parameters.
    """
    check_build(build)
    return params_of(build(_streams(params=key)))


def apply(build: Build, params: Params, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
    """Calls the module (or one of its methods) with these parameters; nothing is mutated.

    Raises:
      ValueError: a parameter is missing, unexpected, or of another shape.
      TypeError: build is no function, but a module or parameters.
    """
    return getattr(bind(build, params), method)(*args, **kwargs)


def bind(build: Build, params: Params) -> Any:
    """Returns the module with these parameters; cheap, also under ``jax.jit``.

    It multiplies integers by their scales (``weights.quantize``).
    """
    graph, state = _abstract(build)
    flat = {name: _dense(leaf) for name, leaf in flatten(params).items()}
    expected = {_path(path): value for path, value in nnx.to_flat_state(state)}
    _check_same(flat, expected)
    merged = nnx.from_flat_state(
        [(path, value.replace(flat[_path(path)])) for path, value in nnx.to_flat_state(state)]
    )
    return nnx.merge(graph, merged)


def check(build: Build, params: Params) -> None:
    """Checks that these parameters are the module's; computes nothing.

    Raises:
      ValueError: as ``apply`` does.
    """
    _check_same(flatten(params), flatten(shapes(build)))


def check_build(build: Any) -> None:
    """Checks that this makes a module, and is not a module itself or its parameters.

    Raises:
      TypeError: it is one of those.
    """
    if isinstance(build, nnx.Module) or not callable(build):
        got = type(build).__name__
        made = got if isinstance(build, nnx.Module) else "Model"
        raise TypeError(
            f"build is a {got}; expected a function that makes the module, "
            f"lambda rngs: {made}(..., rngs=rngs)."
        )


def params_of(module: nnx.Module) -> Params:
    """Returns the parameters of a module object as a nested dict, with its constants."""
    state = nnx.state(module, nnx.filterlib.Any(nnx.Param, Constant))
    return nest({_path(path): value.get_value() for path, value in nnx.to_flat_state(state)})


def logical_axes(build: Build) -> Axes:
    """Returns the names of each parameter's axes; computes nothing.

    Parameters without names, such as those of Flax's own layers, have None for each axis, which is not split.
    """
    _, state = _abstract(build)
    return nest({_path(p): axes_of(v, v.get_value().ndim) for p, v in nnx.to_flat_state(state)})


def axes_of(variable: nnx.Variable, ndim: int) -> tuple[str | None, ...]:
    """Returns the names of a variable's ``ndim`` axes."""
    return variable.get_metadata("axes", (None,) * ndim)


def shapes(build: Build) -> PyTree:
    """Returns the shape and dtype of each parameter; computes nothing."""
    _, state = _abstract(build)
    return nest({_path(path): value.get_value() for path, value in nnx.to_flat_state(state)})


def trainable(build: Build) -> PyTree:
    """Returns True for each parameter that is trained, False for a ``Constant``; computes nothing.

    Weight decay would change constants: ``optax.adamw(rate, mask=trainable(build))`` does not.
    """
    _, state = _abstract(build)
    return nest({_path(p): not isinstance(v, Constant) for p, v in nnx.to_flat_state(state)})


def flatten(params: Params) -> dict[str, Any]:
    """Converts {"a": {"b": x}} to {"a.b": x}."""
    return traverse_util.flatten_dict(params, sep=".")


def nest(flat: dict[str, Any]) -> Params:
    """Inverts ``flatten``."""
    return traverse_util.unflatten_dict(flat, sep=".")


def is_quantized(leaf: Any) -> bool:
    """Returns whether a parameter is integers with scales, as ``qwix.QArray`` is."""
    return hasattr(leaf, "qvalue")


def count(params: Params) -> int:
    """Counts the parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


def _abstract(build: Build):
    check_build(build)
    return _abstract_of(build)


@functools.lru_cache(maxsize=32)
def _abstract_of(build: Build):
    return nnx.split(nnx.eval_shape(lambda: build(_streams(default=jax.random.key(0)))))


class _Stream(nnx.RngStream):
    """Flax's stream of keys, counted without tracing.

    Flax reads the sharding of a traced counter for each key, which slows down as the trace grows.
    """

    def __init__(self, key: Key[Array, ""], tag: str):
        super().__init__(key, tag=tag)
        start: Any = np.uint32(0)
        self.count.set_value(start)

    def __call__(self) -> Key[Array, ""]:
        count: Any = self.count.get_value()
        self.count.set_value(count + np.uint32(1))
        return jax.random.fold_in(self.key[...], count)


def _streams(**keys: Key[Array, ""]) -> nnx.Rngs:
    rngs = nnx.Rngs()
    for name, key in keys.items():
        setattr(rngs, name, _Stream(key, name))
    return rngs


def _path(path: tuple) -> str:
    return ".".join(str(part) for part in path)


def _dense(leaf: Any) -> Array:
    if not is_quantized(leaf):
        return jnp.asarray(leaf)
    values = leaf.qvalue.astype(leaf.scale.dtype)
    if leaf.zero_point is not None:
        values = values - leaf.zero_point.astype(leaf.scale.dtype)
    return values * leaf.scale


def _check_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    if missing := sorted(expected.keys() - given.keys()):
        raise ValueError(f"params lack {', '.join(missing)}; they belong to another configuration.")
    if extra := sorted(given.keys() - expected.keys()):
        raise ValueError(
            f"params have unexpected {', '.join(extra)}; they belong to another model."
        )
    for name, value in given.items():
        if value.shape != expected[name].shape:
            raise ValueError(
                f"params {name} has shape {value.shape}; expected {expected[name].shape}."
            )
