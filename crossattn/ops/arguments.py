"""Checks of the arguments of ``attend`` and its kin: one clear sentence for a wrong one.

Each function raises ValueError that names the argument, what came and what was expected.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops.masks import AnyOf, Explicit, Mask, Not, Term, as_mask
from crossattn.types import AnyArray


def check_operands(q: AnyArray, k: AnyArray, v: AnyArray) -> None:
    for name, x, axes in (("q", q, "[*B T N H]"), ("k", k, "[*B S K H]"), ("v", v, "[*B S K Hv]")):
        if not hasattr(x, "dtype"):
            raise ValueError(f"{name} is a {type(x).__name__}; expected an array {axes}.")
        if jnp.ndim(x) < 3:
            raise ValueError(f"{name} has shape {jnp.shape(x)}; expected at least 3 axes, {axes}.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}; expected a floating-point dtype.")
    if q.shape[-1] == 0:
        raise ValueError(f"q has head size 0 (shape {q.shape}); expected at least 1.")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k has head size {k.shape[-1]} (shape {k.shape}); expected q's, {q.shape[-1]}."
        )
    if k.shape[:-3] != q.shape[:-3]:
        raise ValueError(f"k has batch axes {k.shape[:-3]}; expected q's, {q.shape[:-3]}.")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v has shape {v.shape}; expected k's batch, length and heads, {k.shape[:-1]}, "
            "then its own head size."
        )
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        order = "[B N T H] is to be jnp.swapaxes(x, 1, 2)"
        if q.ndim == 3:
            order = (
                "three are [T N H] without a batch, and vectors [B T D] one head as x[:, :, None]"
            )
        raise ValueError(
            f"q has {q.shape[-2]} heads and k has {k.shape[-2]} (shapes {q.shape} and {k.shape}); expected "
            f"q's to be a multiple of k's. Axes are [*B T N H]: {order}."
        )


def check_broadcast(name: str, x: AnyArray, full: tuple[int, ...], kind) -> None:
    dtype = getattr(x, "dtype", type(x).__name__)
    wanted = "bool" if kind is bool else "a floating-point dtype"
    known = hasattr(x, "dtype")
    if not known or not jnp.issubdtype(dtype, jnp.bool_ if kind is bool else kind):
        meant = "did you mean mask=?" if kind is not bool else "did you mean bias=?"
        if known and kind is bool and jnp.issubdtype(dtype, jnp.integer):
            meant = "of 0 and 1, mask.astype(bool)"
        raise ValueError(
            f"{name} {'has dtype' if known else 'is a'} {dtype}; expected {wanted} ({meant}). "
            "mask is boolean, True = may be read; bias is added to the logits."
        )
    if x.ndim != len(full) or any(n not in (1, m) for n, m in zip(x.shape, full, strict=True)):
        either = f": three could mean [B T S], {name}[:, None], or [N T S], {name}[None]"
        raise ValueError(
            f"{name} has shape {x.shape}; expected {len(full)} axes [*B N T S] = {full}, each of that "
            f"size or 1{either if (x.ndim, len(full)) == (3, 4) else ''}."
        )


def check_number(name: str, x: Any, positive: bool = False) -> None:
    wanted = f"expected a number{' above 0' if positive else ''}, or None."
    if x is None:
        return
    dtype = getattr(x, "dtype", type(x))
    if jnp.shape(x) != () if hasattr(x, "dtype") else not isinstance(x, (int, float)):
        said = f"has shape {x.shape}" if hasattr(x, "shape") else f"is {x!r}"
        raise ValueError(f"{name} {said}; {wanted}")
    if not jnp.issubdtype(dtype, jnp.number) or isinstance(x, bool):
        raise ValueError(f"{name} is of type {dtype}; {wanted}")
    if positive and not isinstance(x, jax.core.Tracer) and not x > 0:
        raise ValueError(f"{name} is {x}; {wanted}")


def check_dropout(rate: float, key: Any) -> None:
    if isinstance(rate, bool) or not isinstance(rate, (int, float, np.number)):
        raise ValueError(
            f"dropout_rate is {rate!r}; expected a number known before tracing, 0 <= rate < 1."
        )
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate is {rate}; expected 0 <= rate < 1.")
    if rate > 0 and key is None:
        raise ValueError(
            f"dropout_rate is {rate} but dropout_key is None; pass a jax.random.key, or rate 0."
        )
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.ndim == 0
    raw = dtype == jnp.uint32 and key.ndim == 1  # as jax.random.PRNGKey makes them
    if key is not None and not typed and not raw:
        said = f"has shape {key.shape} and dtype {dtype}" if dtype is not None else f"is {key!r}"
        raise ValueError(f"dropout_key {said}; expected one jax.random.key.")


# What users of other libraries type first, and what it is called here.
_CALLED_HERE = {
    "is_causal": "causality is a mask, crossattn.masks.causal()",
    "attn_mask": "a boolean mask is mask=, True = may be read (nn.MultiheadAttention hides where it "
    "is True: ~attn_mask), and one of numbers that are added is bias=",
    "key_padding_mask": "which keys may be read is a mask, crossattn.masks.key_padding(~key_padding_mask), "
    "or the memory's valid=~key_padding_mask: True = may be read, and in PyTorch it hides",
    "need_weights": "it is return_weights=True, for the weights of every head",
    "average_attn_weights": "return_weights=True gives those of every head; their mean is weights.mean(-3)",
    "dropout_p": "it is dropout_rate= with a dropout_key=",
    "kdim": "it is memory_dim",
    "vdim": "keys and values are made from vectors of memory_dim",
    "batch_first": "axes are always [*B T D]",
    "dropout": "it is dropout_rate, and needs a dropout_key in a call",
    "bias": "it is use_bias",
}


def refuse_unknown(function: str, unknown: dict[str, Any]) -> None:
    """Raises TypeError for a keyword argument that a function lacks."""
    for name in unknown:
        here = f"; {_CALLED_HERE[name]}" if name in _CALLED_HERE else ""
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{here}.")


def check_mask(mask: Mask | AnyArray | None, full: tuple[int, ...]) -> Mask | None:
    """Checks that the arrays of a mask's terms fit a call, from their shapes alone.

    Returns:
      The mask, its matrices without the leading axes of size 1 that this call does not have; None where it
      hides nothing.
    """
    if mask is not None and not isinstance(mask, Mask):
        check_broadcast("mask", mask, full, bool)
        mask = as_mask(mask, len(full))
    if mask is None or not mask.terms:
        return None
    T, S = full[-2:]
    mask = Mask(tuple(_of_rank(term, full) for term in mask.terms))
    mask.check(T, S)
    try:
        # Where they lie has no part in it.
        leaves, structure = jax.tree.flatten(mask)
        bare = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]

        def block(leaves):
            return jax.tree.unflatten(structure, leaves).block(jnp.arange(T), jnp.arange(S))

        shape = jax.eval_shape(block, bare).shape
        fits = jnp.broadcast_shapes(shape, full) == full
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"mask does not fit [*B N T S] = {full}: {error}") from error
    if not fits:
        raise ValueError(
            f"mask has shape {shape}; expected one that broadcasts to [*B N T S] = {full}."
        )
    return mask


def _of_rank(term: Term, full: tuple[int, ...]) -> Term:
    if isinstance(term, (AnyOf, Not)):
        masks = term.masks if isinstance(term, AnyOf) else (term.mask,)
        parts = [Mask(tuple(_of_rank(one, full) for one in mask.terms)) for mask in masks]
        return AnyOf(tuple(parts)) if isinstance(term, AnyOf) else Not(parts[0])
    if not isinstance(term, Explicit):
        return term
    allowed = term.allowed
    if 4 <= allowed.ndim < len(full) and any(n != 1 for n in allowed.shape[:-2]):
        raise ValueError(
            f"mask has shape {allowed.shape}; expected all {len(full)} axes [*B N T S] = {full}, of size 1 "
            f"where shared: with {allowed.ndim} it is unclear which are missing."
        )
    while allowed.ndim > len(full) and allowed.shape[0] == 1:
        allowed = allowed[0]
    return Explicit(allowed)
