"""The sites of a model, and its call with interventions on some of them.

A copy of the model carries the interventions beside its parameters, a slice in each layer: a scan slices them
as it slices parameters, and searches, caches and export need not know of them.
"""

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossattn.nn.blocks import Block
from crossattn.nn.edits import Edits, Intervention, collecting
from crossattn.nn.stack import Stack


@dataclass(frozen=True)
class Site:
    """An activation of every layer of a stack.

    Attributes:
      layers: the layers that have it, L; 1 for a block alone.
      heads: N of "....heads", else None.
    """

    layers: int
    heads: int | None = None


Sites = dict[str, Site]
Interventions = Mapping[str, Any]
"""An ``Intervention`` by site."""


def sites(model: nnx.Module) -> Sites:
    """Lists the sites of a model: the path of a stack or block, a dot, and a name of ``Block.capturable``.

    "encoder.attention.heads" are what the heads of the encoder's self-attention read [L *B T N Hv],
    "decoder.cross" the output of cross-attention [L *B T D], "decoder.+cross" the vectors after it,
    "decoder.cross.values" the values of its memory [L *B S K Hv], "decoder.cross.weights" its weights and
    "decoder.cross.stats" their ``attention_stats``, which cannot be edited. ``.stack`` and ``.layers`` of a
    parameter's name are left out.
    """
    return {
        prefix + name: Site(len(layers), _heads(layers[0], name))
        for prefix, stack in stacks_of(model).items()
        for name in dict.fromkeys(name for block in blocks_of(stack) for name in block.capturable)
        for layers in [[block for block in _layers(stack) if name in block.capturable]]
    }


def run(
    model: Any,
    interventions: Interventions | None,
    *args: Any,
    capture: Collection[str] = (),
    method: str = "__call__",
    **kwargs: Any,
) -> Any:
    """Calls a model, or one of its methods, with interventions.

    Args:
      interventions: by site; None and {} are none. Where a memory is projected ahead, by ``prefill``, that
        call is the one to edit "....values" in.
      capture: sites whose activations are returned, after their interventions.
      method: "prefill" and "decode_step", for example, with states from one to the other.

    Returns:
      The result of the call; with ``capture``, a pair with the activations by site, [L ...] in the order of
      layers, those of several calls of a stack one after the other.

    Raises:
      ValueError: a site that there is not, or an intervention of another shape; a captured site that the
        call did not reach.
      TypeError: capture is one name, not a collection.
    """
    if isinstance(capture, str):
        raise TypeError(f"capture is {capture!r}; expected a list of sites, [{capture!r}].")
    named = intervene(model, interventions)
    if not capture:
        return getattr(named, method)(*args, **kwargs)
    call = lambda tapped: getattr(tapped, method)(*args, **kwargs)  # noqa: E731
    result, found = captured(call, named, capture)
    if lacking := [name for name in capture if name not in found]:
        raise ValueError(
            f"{method} did not reach {lacking[0]}; expected a call that runs its layers."
        )
    return result, {name: found[name] for name in capture}


def captured(
    call: Callable[[Any], Any], model: Any, capture: Collection[str]
) -> tuple[Any, dict[str, Any]]:
    """Returns ``call(model)`` and the activations of the sites that it reached, [L ...]; for whole losses.

    Raises:
      ValueError: a site that there is not.
    """
    with collecting() as found:
        result = call(_tapped(model, capture))
    return result, {name: _joined(xs) for name, xs in found.items()}


def _joined(calls: list[Any]) -> Any:
    """Joins the activations of several calls, layer after layer."""
    if len(calls) == 1:
        return calls[0]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *calls)


def intervene(model: Any, interventions: Interventions | None) -> Any:
    """Returns a copy of the model with interventions, which is called and decodes as the model.

    Layers that share parameters get blocks of their own, looped, of the same arrays.

    Raises:
      ValueError: a site that there is not, one that is read only, or an intervention whose first axis is
        not layers.
    """
    if not interventions:
        return model
    known = sites(model)
    for name, edit in interventions.items():
        _check(name, edit, known)
    model = nnx.clone(model)
    for prefix, stack in stacks_of(model).items():
        own = {k.removeprefix(prefix): x for k, x in interventions.items() if k.startswith(prefix)}
        own = {
            name: x
            for name, x in own.items()
            if any(name in b.capturable for b in blocks_of(stack))
        }
        if own:
            _write(stack, own)
    return model


def _write(stack: Stack | Block, edits: dict[str, Intervention]) -> None:
    """Gives each block of a stack its part of the interventions."""
    if isinstance(stack, Stack) and stack.share:
        stack.layers = nnx.List([nnx.clone(block) for block in stack.blocks()])
        stack.share, stack.scan, stack.period = False, False, None
    scanned, kinds = isinstance(stack, Stack) and stack.scan, blocks_of(stack)
    for i, block in enumerate(kinds):
        own = {}
        for name, edit in edits.items():
            having = [k for k, other in enumerate(kinds) if name in other.capturable]
            if i in having:
                place, step = having.index(i), len(having)
                part = (
                    (lambda x, at=place, by=step: jnp.asarray(x)[at::by])
                    if scanned
                    else (lambda x, at=place: jnp.asarray(x)[at])
                )
                own[name] = jax.tree.map(part, edit)
        block.edits = Edits(own) if own else None


def _tapped(model: Any, capture: Collection[str]) -> Any:
    """Returns a copy that hands out the activations of these sites."""
    known = sites(model)
    for name in capture:
        find(name, known)
    model = nnx.clone(model)
    for prefix, stack in stacks_of(model).items():
        own = {site for block in blocks_of(stack) for site in block.capturable}
        stack.taps = tuple(
            (site, prefix + site) for site in sorted(own) if prefix + site in capture
        )
    return model


def _check(name: str, edit: Any, known: Sites) -> None:
    site = find(name, known)
    if name.endswith((".weights", ".stats")):
        raise ValueError(
            f"{name} can be captured alone, since kernels do not make weights; expected an intervention on "
            f"{name.rpartition('.')[0]}.heads, or a mask of the call."
        )
    if not isinstance(edit, Intervention):
        raise ValueError(
            f"the intervention on {name} is a {type(edit).__name__}; expected Intervention(scale=...), or "
            "value= with where=."
        )
    if edit.value is None and edit.where is not None:
        raise ValueError(
            f"the intervention on {name} has where= and no value=; expected both, or a scale."
        )
    for part, x in vars(edit).items():
        if x is None:
            continue
        if isinstance(x, list | tuple):
            raise ValueError(
                f"the {part} of the intervention on {name} is a {type(x).__name__}; expected an array."
            )
        shape: Any = jnp.shape(x)
        heads = part == "scale" and site.heads is not None and len(shape) > 1
        if shape[:1] != (site.layers,) or (heads and shape[-1] not in (1, site.heads)):
            per = "" if site.heads is None else f" of {site.heads} heads"
            raise ValueError(
                f"the {part} of the intervention on {name} has shape {shape}; expected {site.layers} layers"
                f"{per}, ({site.layers}, {'...' if site.heads is None else site.heads})."
            )


def find(name: str, known: Sites) -> Site:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected of {', '.join(known) or 'none'}."
    raise ValueError(f"the model has no site {name!r}; {hint}")


def stacks_of(model: Any) -> dict[str, Stack | Block]:
    """Finds stacks, and blocks outside them, by the prefix of their sites."""
    found: dict[str, Stack | Block] = {}
    inside: list[tuple] = []
    modules: Any = sorted(nnx.iter_modules(model), key=lambda pair: len(pair[0]))
    for path, module in modules:
        if any(path[: len(parent)] == parent for parent in inside):
            continue
        kinds = module.kinds() if isinstance(module, Stack) else []
        if isinstance(module, Block) or (kinds and all(isinstance(x, Block) for x in kinds)):
            inside.append(path)
            parts = [str(part) for part in path if part != "stack"]
            found["".join(f"{part}." for part in parts)] = module
    return found


def blocks_of(stack: Stack | Block) -> list[Any]:
    return stack.kinds() if isinstance(stack, Stack) else [stack]


def _layers(stack: Stack | Block) -> list[Any]:
    """Returns a block a layer; those of a scanned stack have parameters of all periods."""
    kinds = blocks_of(stack)
    count = stack.num_layers if isinstance(stack, Stack) else 1
    return [kinds[i % len(kinds)] for i in range(count)]


def _heads(block: Block, name: str) -> int | None:
    if not name.endswith(".heads"):
        return None
    attention: Any = block.heads_of(name.removesuffix(".heads"))
    return attention.query.out_features[0]
