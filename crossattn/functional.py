"""Modules as pure functions: parameters in a plain nested dict, ``init`` and ``apply``.

A *build* is a function from ``nnx.Rngs`` to a module, for example
``lambda rngs: Transformer(config, rngs=rngs)``. The dicts have string keys only, so they go through
``jax.jit``, ``jax.value_and_grad``, optax, Orbax and safetensors as they are.

To use a module inside Linen code, bridge it where you need it::

    from flax import nnx
    attention = nnx.bridge.ToLinen(xa.nn.MultiHeadAttention, args=(64,), kwargs={"num_heads": 4})
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossattn.types import Array, Axes, Key, Params, PyTree

Build = Callable[[nnx.Rngs], nnx.Module]


class Constant(nnx.Variable):
    """A checkpoint's weight that is not trained, such as Whisper's sinusoids.

    It is one of the parameters, so that it is saved as it was; ``nnx.grad`` and ``nnx.Optimizer`` pass it
    over, ``trainable`` tells it from the others, and its first logical axis is "constant", by which
    ``train.optim`` does not decay it.
    """


def init(build: Build, key: Key[Array, ""]) -> Params:
    """Fresh parameters of the module that ``build`` makes, as a nested dict."""
    return params_of(build(_streams(params=key)))


def apply(build: Build, params: Params, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
    """Call the module (or one of its methods) with these parameters; nothing is mutated.

    Raises:
      ValueError: a parameter is missing, unexpected, or of another shape.
    """
    return getattr(bind(build, params), method)(*args, **kwargs)


def bind(build: Build, params: Params) -> Any:
    """The module holding these parameters; cheap, and fine under ``jax.jit``.

    Integers with scales (``weights.quantize``) are multiplied out here.
    """
    graph, state = _abstract(build)
    flat = {name: _dense(leaf) for name, leaf in _leaves(params)}
    expected = {_path(path): value for path, value in nnx.to_flat_state(state)}
    _check_same(flat, expected)
    merged = nnx.from_flat_state(
        [(path, value.replace(flat[_path(path)])) for path, value in nnx.to_flat_state(state)]
    )
    return nnx.merge(graph, merged)


def check(build: Build, params: Params) -> None:
    """Whether these parameters are the module's; nothing is computed.

    Raises:
      ValueError: as ``apply`` does.
    """
    _check_same(flatten(params), flatten(shapes(build)))


def params_of(module: nnx.Module) -> Params:
    """The parameters of a module object as a nested dict, constants among them."""
    state = nnx.state(module, nnx.filterlib.Any(nnx.Param, Constant))
    return nest({_path(path): value.get_value() for path, value in nnx.to_flat_state(state)})


def logical_axes(build: Build) -> Axes:
    """For each parameter, the names of its axes; nothing is computed.

    Parameters without names, as those of Flax's own layers, have None for each axis: whole everywhere.
    """
    _, state = _abstract(build)
    return nest({_path(p): axes_of(v, v.get_value().ndim) for p, v in nnx.to_flat_state(state)})


def axes_of(variable: nnx.Variable, ndim: int) -> tuple[str | None, ...]:
    """The names of a variable's axes, of which there are ``ndim``."""
    return variable.get_metadata("axes", (None,) * ndim)


def shapes(build: Build) -> PyTree:
    """For each parameter, its shape and dtype; nothing is computed."""
    _, state = _abstract(build)
    return nest({_path(path): value.get_value() for path, value in nnx.to_flat_state(state)})


def trainable(build: Build) -> PyTree:
    """For each parameter, whether it is one to train; nothing is computed.

    Constants have no gradient, but decay of weights needs none: ``optax.adamw(rate, mask=trainable(build))``.
    """
    _, state = _abstract(build)
    return nest({_path(p): not isinstance(v, Constant) for p, v in nnx.to_flat_state(state)})


def flatten(params: Params) -> dict[str, Any]:
    """The inverse of ``nest``."""
    return dict(_leaves(params))


def is_quantized(leaf: Any) -> bool:
    """Whether a parameter is held as integers with scales, as ``qwix.QArray`` does."""
    return hasattr(leaf, "qvalue")


def count(params: Params) -> int:
    """Number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))


@functools.lru_cache(maxsize=32)
def _abstract(build: Build):
    return nnx.split(nnx.eval_shape(lambda: build(_streams(default=jax.random.key(0)))))


class _Stream(nnx.RngStream):
    """The keys that Flax's stream gives, counted without tracing.

    Flax asks a traced counter for its sharding with each key, which takes longer the more was traced.
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


def nest(flat: dict[str, Any]) -> Params:
    """{"a.b": x} -> {"a": {"b": x}}."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split(".")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return nested


def _leaves(params: Params, prefix: str = ""):
    for name, value in params.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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
