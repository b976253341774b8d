"""Edits of activations while a model runs, and activations handed out of its call.

A block has sites, named as in ``Block.capturable``. It edits a site where ``block.edits`` has an
``Intervention`` for it, and computes nothing else where it has none. ``crossattn.interventions`` writes them
into a copy of a model.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.types import AnyArray, Array, Bool, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Intervention:
    """An edit of one activation, ``where(where, value, scale * x)``; what is None leaves it as it is.

    The first axis of each is layers, L. The others broadcast to the activation of a layer: those of ``scale``
    and ``where`` to all its axes but features, [T] or [B T] for vectors [B T D], [N] for heads [B T N Hv],
    [S] for a memory's values [B S K Hv].

    Attributes:
      scale: factors; 0 knocks out, 1 changes no bit.
      value: the activation in its place, of another run for example, [L *B T D].
      where: where it is replaced; None is everywhere.
    """

    scale: Float[AnyArray, "..."] | None = None
    value: Float[AnyArray, "..."] | None = None
    where: Bool[AnyArray, "..."] | None = None


class Edits(nnx.Variable):
    """The interventions of a block by site; no parameter, so they are neither trained nor saved."""


def features(site: str) -> int:
    """Returns how many axes of an activation are features: 2 of a memory's values, else 1."""
    return 2 if site.endswith(".values") else 1


def edited(site: str, x: Array, edit: Intervention | None) -> Array:
    """Applies an intervention to the activation of one layer.

    Raises:
      ValueError: its arrays do not broadcast to the activation.
    """
    if edit is None:
        return x
    lead = x.shape[: x.ndim - features(site)]
    if edit.scale is not None:
        x = x * _spread(site, "scale", edit.scale, lead, x.ndim).astype(x.dtype)
    if edit.value is not None:
        value = _spread(site, "value", edit.value, x.shape, x.ndim).astype(x.dtype)
        if edit.where is None:
            return jnp.broadcast_to(value, x.shape)
        return jnp.where(_spread(site, "where", edit.where, lead, x.ndim), value, x)
    return x


def _spread(site: str, name: str, given: Any, shape: tuple[int, ...], ndim: int) -> Array:
    """Aligns an array of one layer with the axes before the features."""
    given = jnp.asarray(given)
    if _open.row is not None and given.ndim == len(shape) and given.shape[0] == _open.row[1]:
        given = given[_open.row[0]][None]
    same = zip(reversed(given.shape), reversed(shape), strict=False)
    if given.ndim > len(shape) or any(own not in (1, size) for own, size in same):
        raise ValueError(
            f"the {name} of the intervention on {site} has shape {given.shape} in a layer; expected one that "
            f"broadcasts to {shape}."
        )
    return given.reshape(*given.shape, *(1,) * (ndim - len(shape)))


class _Open(threading.local):
    """The collections that are open on this thread, and the row of the batch that runs alone."""

    def __init__(self) -> None:
        self.found: list[dict[str, list[Array]]] = []
        self.row: tuple[Array, int] | None = None


_open = _Open()


@contextmanager
def collecting() -> Iterator[dict[str, list[Array]]]:
    """Collects what ``hand_out`` gets inside, by name, in the order of the calls."""
    _open.found.append({})
    try:
        yield _open.found[-1]
    finally:
        _open.found.pop()


@contextmanager
def row_of(row: Array, rows: int) -> Iterator[None]:
    """Lets interventions with a batch axis of so many rows edit this row, a batch of one, inside."""
    before, _open.row = _open.row, (row, rows)
    try:
        yield
    finally:
        _open.row = before


def hand_out(found: dict[str, Any]) -> None:
    """Gives activations to the innermost collection, if there is one."""
    for name, x in found.items() if _open.found else ():
        _open.found[-1].setdefault(name, []).extend(x if isinstance(x, list) else [x])


def with_handed_out(call: Callable[..., Any]) -> Callable[..., tuple[Any, dict[str, list[Array]]]]:
    """Makes a function return what it hands out too, so that JAX can transform it."""

    def run(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, list[Array]]]:
        with collecting() as found:
            result = call(*args, **kwargs)
        return result, found

    return run
