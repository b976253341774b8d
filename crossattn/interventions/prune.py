"""Pruning: heads taken out of the parameters, so that the model is smaller, not only masked.

The pruned model is a module as before. Its parameters, of ``xa.functional.params_of``, are read again by a
build that prunes as well, ``lambda rngs: prune(Transformer(config, rngs=rngs), kept)``.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossattn.interventions.sites import blocks_of, find, sites, stacks_of
from crossattn.nn.attention import MultiHeadAttention
from crossattn.nn.inputs import PositionBias
from crossattn.nn.stack import Stack
from crossattn.types import Bool


def prune(model: Any, kept: Mapping[str, Bool[np.ndarray, "L N"]]) -> Any:
    """Returns a copy of the model with the kept heads alone, which computes what scales of 0 compute.

    Looped layers may keep unlike numbers of heads, at least one; scanned layers, whose parameters are one
    array, keep the same number each.

    Args:
      kept: by site of heads, "decoder.cross.heads": True for a head that stays.

    Raises:
      ValueError: there is no such site, or the array has another shape; scanned layers keep unlike numbers,
        a layer none, layers share their parameters, heads that share a key and value head do not go
        together, or a position bias that all layers share has a row for each head.
    """
    known = sites(model)
    for name, own in kept.items():
        site = find(name, known)
        if np.shape(own) != (site.layers, site.heads):
            raise ValueError(
                f"kept has shape {np.shape(own)} for {name}; expected {(site.layers, site.heads)}, True for "
                "a head that stays."
            )
    model = nnx.clone(model)
    stacks = stacks_of(model)
    for name, own in kept.items():
        prefix = max((p for p in stacks if name.startswith(p)), key=len)
        _prune_site(model, stacks[prefix], name, name.removeprefix(prefix), np.asarray(own, bool))
    return model


def _prune_site(model: Any, stack: Any, name: str, site: str, kept: np.ndarray) -> None:
    if isinstance(stack, Stack) and stack.share:
        raise ValueError(
            f"layers of {name} share their parameters; expected a stack without share=True."
        )
    if not kept.any(-1).all():
        raise ValueError(
            f"a layer of {name} keeps no head; expected one at least, or a scale of 0."
        )
    having = [block for block in blocks_of(stack) if site in block.capturable]
    if not kept.all() and _has_bias_of_heads(model, having[0], site.removesuffix(".heads")):
        raise ValueError(
            f"{name} adds a position bias that has a row for each head and is shared by all layers; expected "
            "scales of 0 there, which leave the parameters as they are."
        )
    for i, block in enumerate(having):
        stacked = isinstance(stack, Stack) and stack.scan
        own = kept[i :: len(having)] if stacked else kept[i][None]
        if len(set(own.sum(-1))) > 1:
            raise ValueError(
                f"scanned layers of {name} keep {', '.join(map(str, own.sum(-1)))} heads; expected the same "
                "number each, or looped layers (scan=False)."
            )
        _prune_attention(block.heads_of(site.removesuffix(".heads")), own, stacked, name)


def _has_bias_of_heads(model: Any, block: Any, name: str) -> bool:
    """Returns whether attention gets a bias of distances with a row for each head."""
    if name in block.readers:
        return getattr(getattr(block, name), "relative", None) is not None
    kinds = [x for _, x in nnx.iter_modules(model) if isinstance(x, PositionBias)]
    return any(x.relative is not None or x.alibi_heads for x in kinds)


def _prune_attention(own: MultiHeadAttention, kept: np.ndarray, stacked: bool, name: str) -> None:
    """Takes heads out of an attention; ``stacked`` parameters have an axis of layers."""
    K, *sizes = own.kv_shape
    N = kept.shape[-1]
    groups = kept.reshape(len(kept), K, N // K)
    if not (groups.all(-1) | ~groups.any(-1)).all():
        raise ValueError(
            f"heads of {name} share key and value heads by {N // K}; expected whole groups to go."
        )
    heads = np.stack([np.flatnonzero(row) for row in kept])
    pairs = np.stack([np.flatnonzero(row.any(-1)) for row in groups])

    def taken(variable: Any, chosen: np.ndarray, axis: int) -> None:
        x = variable.get_value()
        if not stacked:
            variable.set_value(jnp.take(x, chosen[0], axis=axis))
            return
        rows = [jnp.take(row, at, axis=axis) for row, at in zip(x, chosen, strict=True)]
        variable.set_value(jnp.stack(rows))

    for layer, chosen in ((own.query, heads), (own.key, pairs), (own.value, pairs)):
        taken(layer.kernel, chosen, 1)
        if layer.bias is not None:
            taken(layer.bias, chosen, 0)
        layer.out_features = (chosen.shape[-1], *layer.out_features[1:])
    taken(own.out.kernel, heads, 0)
    own.out.in_features = (heads.shape[-1], *own.out.in_features[1:])
    if own.persistent is not None:
        for variable in nnx.to_flat_state(nnx.state(own.persistent, nnx.Param)):
            taken(variable[1], pairs, 1)
    own.kv_shape = (pairs.shape[-1], *sizes)
