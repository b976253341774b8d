"""Interventions on heads: one knocked out, all knocked out one at a time, and the gradient for all at once.

jax.vmap(lambda one: loss(run(model, one, **batch)))(knockouts(model, "decoder.cross.heads"))
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from crossattn.interventions.sites import Site, Sites, find, sites
from crossattn.nn.edits import Intervention
from crossattn.types import Array, Float


def scales(model: Any, names: Sequence[str] | None = None) -> dict[str, Intervention]:
    """Makes scales of 1 on heads [L N], the point at which ``importance`` differentiates.

    Args:
      names: sites of heads; None is all of the model.

    Raises:
      ValueError: the model has no such site, or it is not one of heads.
    """
    known = sites(model)
    names = [name for name, site in known.items() if site.heads] if names is None else names
    return {name: Intervention(scale=jnp.ones(_shape(name, known))) for name in names}


def knockout(model: Any, name: str, layer: int, head: int) -> dict[str, Intervention]:
    """Makes the intervention that knocks one head out.

    Raises:
      ValueError: there is no such site, layer or head.
    """
    L, N = _shape(name, sites(model))
    for what, at, count in (("layer", layer, L), ("head", head, N)):
        if not -count <= at < count:
            raise ValueError(f"{what} is {at}, but {name} has {count}; expected 0 to {count - 1}.")
    return {name: Intervention(scale=jnp.ones((L, N)).at[layer, head].set(0))}


def knockouts(model: Any, *names: str) -> dict[str, Intervention]:
    """Makes all interventions that knock one head out, for ``jax.vmap``: scales [K L N] of K heads.

    Args:
      *names: sites of heads, whose heads come in this order, layer by layer; none is all of the model.

    Raises:
      ValueError: there is no such site of heads.
    """
    known = sites(model)
    shapes = {name: _shape(name, known) for name in names or scales(model)}
    if not shapes:
        raise ValueError(
            "the model has no site of heads; expected attention in a Stack or a Block."
        )
    counts = [L * N for L, N in shapes.values()]
    off = jnp.split(1 - jnp.eye(sum(counts)), list(itertools.accumulate(counts))[:-1], axis=1)
    pairs = zip(shapes.items(), off, strict=True)
    return {name: Intervention(scale=x.reshape(-1, *shape)) for (name, shape), x in pairs}


def importance(
    model: Any,
    loss: Callable[[dict[str, Intervention]], Float[Array, " B"]],
    names: Sequence[str] | None = None,
) -> dict[str, Float[Array, "L N"]]:
    """Computes each head's importance: the mean over examples of the gradient's size for its scale.

    Args:
      loss: of interventions, the loss of each example of a batch, such as
        ``lambda given: losses(run(model, given, **batch))``; an example's loss reads its own row alone.
      names: sites of heads; None is all.

    Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?", equation 2.
    """
    at = scales(model, names)
    losses, pull = jax.vjp(loss, at)
    # A backward pass an example, one after the other: heads of a site may have any axes before theirs.
    found = jax.lax.map(lambda one: pull(one)[0], jnp.eye(len(losses), dtype=losses.dtype))
    return {name: jnp.abs(x.scale).mean(0) for name, x in found.items()}


def _shape(name: str, known: Sites) -> tuple[int, int]:
    site: Site = find(name, known)
    if site.heads is None:
        headed = [name for name, site in known.items() if site.heads]
        raise ValueError(f"{name} has no heads; expected of {', '.join(headed) or 'none'}.")
    return site.layers, site.heads
