"""Checks of the arguments of ``attend`` and its kin: one clear sentence for a wrong one.

Each function raises ValueError that names the argument, what came and what was expected.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops.masks import AnyOf, Explicit, Mask, Not, Term, as_mask
from crossattn.types import AnyArray

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


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
        said = f"{'has dtype' if known else 'is a'} {dtype}"
        raise ValueError(
            f"{name} {said}; expected {wanted} ({_meant(name, x, kind)}). "
            "mask is boolean, True = may be read; bias is added to the logits."
        )
    if x.ndim != len(full) or any(n not in (1, m) for n, m in zip(x.shape, full, strict=True)):
        either = f": three could mean [B T S], {name}[:, None], or [N T S], {name}[None]"
        raise ValueError(
            f"{name} has shape {x.shape}; expected {len(full)} axes [*B N T S] = {full}, each of that "
            f"size or 1{either if (x.ndim, len(full)) == (3, 4) else ''}."
        )


def _meant(name: str, x: Any, kind: Any) -> str:
    """Returns what is to be written in place of a mask or bias of another type."""
    if not hasattr(x, "dtype"):
        if callable(x):
            return f"call it: {name}={getattr(x, '__name__', name)}()"
        kinds = "an array, jnp.asarray(x)" if isinstance(x, (list, tuple)) else "an array"
        return f"{kinds}, or one of crossattn.masks" if kind is bool else kinds
    if kind is not bool:
        return "did you mean mask=?"
    if jnp.issubdtype(x.dtype, jnp.integer):
        return "of 0 and 1, mask.astype(bool)"
    return "of 0.0 and 1.0, mask > 0; of 0 and -inf, bias="


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


def check_dropout_rate(rate: Any) -> None:
    if isinstance(rate, bool) or not isinstance(rate, (int, float, np.number)):
        raise ValueError(
            f"dropout_rate is {rate!r}; expected a number known before tracing, 0 <= rate < 1."
        )
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate is {rate}; expected 0 <= rate < 1.")


def check_dropout(rate: float, key: Any) -> None:
    check_dropout_rate(rate)
    if rate > 0 and key is None:
        raise ValueError(
            f"dropout_rate is {rate} but dropout_key is None; pass a jax.random.key, or rate 0."
        )
    if key is None:
        return
    if not isinstance(key, (jax.Array, np.ndarray)):  # flax's Rngs have attributes of any name
        said = f"is {key!r}" if isinstance(key, (int, str)) else f"is of type {type(key).__name__}"
        of_flax = ", such as rngs.dropout()" if "Rng" in type(key).__name__ else ""
        raise ValueError(f"dropout_key {said}; expected one jax.random.key{of_flax}.")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
    raw = key.dtype == jnp.uint32 and key.ndim == 1  # as jax.random.PRNGKey makes them
    if not typed and not raw:
        raise ValueError(
            f"dropout_key has shape {key.shape} and dtype {key.dtype}; expected one jax.random.key."
        )


# What users of other libraries type first, and what it is called here.
_CALLED_HERE = {
    "is_causal": "causality is a mask, crossattn.masks.causal()",
    "use_causal_mask": "causality is a mask, crossattn.masks.causal()",
    "attn_mask": "a boolean mask is mask=, True = may be read (nn.MultiheadAttention hides where it "
    "is True: ~attn_mask), and one of numbers that are added is bias=",
    "attention_mask": "a boolean mask is mask=, True = may be read, and a row of 0 and 1 for each text is "
    "crossattn.masks.key_padding(attention_mask > 0)",
    "key_padding_mask": "which keys may be read is a mask, crossattn.masks.key_padding(~key_padding_mask), "
    "or the memory's valid=~key_padding_mask: True = may be read, and in PyTorch it hides",
    "need_weights": "it is return_weights=True, for the weights of every head",
    "output_attentions": "it is return_weights=True, for the weights of every head",
    "return_attention_scores": "it is return_weights=True, for the weights of every head",
    "average_attn_weights": "return_weights=True gives those of every head; their mean is weights.mean(-3)",
    "dropout_p": "it is dropout_rate= with a dropout_key=",
    "deterministic": "a call drops weights where it gets a dropout_key",
    "training": "a call drops weights where it gets a dropout_key",
    "enable_gqa": "k and v with fewer heads than q are shared by themselves",
    "embed_dim": "it is dim",
    "in_features": "it is dim",
    "qkv_features": "it is num_heads * head_dim",
    "out_features": "it is out_dim",
    "key_dim": "it is head_dim, and the size of the queries is dim",
    "kdim": "it is memory_dim",
    "vdim": "keys and values are made from vectors of memory_dim",
    "batch_first": "axes are always [*B T D]",
    "dropout": "it is dropout_rate, and needs a dropout_key in a call",
    "bias": "it is use_bias",
    "encoder_hidden_states": "what is read is the second argument, memory=",
    "context": "what is read is the second argument, memory=",
}
_QUERIES = (
    "for attention(query, key, value) write attention(query, key) where value is key, and else "
    "attention(query, attention.memory(key, values_of=value))"
)
_CALLED_HERE |= dict.fromkeys(
    ("query", "key", "value", "inputs_q", "inputs_k", "inputs_v"), _QUERIES
)
_IN = {  # of one call
    "attend": {"query": "it is q", "key": "it is k", "value": "it is v"},
    "Block.__call__": {
        "tgt": "it is x",
        "memory": 'what a block reads goes by name, memories={"source": memory}',
        "tgt_mask": "it is mask=, True = may attend; a decoder block is causal by itself",
        "tgt_key_padding_mask": "it is mask=crossattn.masks.key_padding(~tgt_key_padding_mask)",
        "memory_mask": 'it is memory_masks={"source": mask}, True = may be read',
        "memory_key_padding_mask": 'it is memory_masks={"source": crossattn.masks.key_padding('
        "~memory_key_padding_mask)}: True = may be read",
    },
}
_BY_POSITION = {
    "attend": "bias=, dropout_rate= and the others go by name",
    "MultiHeadAttention.__init__": "dropout_rate=, use_bias= and the others go by name",
    "MultiHeadAttention.__call__": f"{_QUERIES}, with mask= by name",
}
_MISSING = {"rngs": "parameters are drawn from rngs=flax.nnx.Rngs(0)"}


def in_words_of_here(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a function that refuses what it does not take with what to write instead.

    The refusal is a TypeError of one line, for arguments that are unknown, missing, or too many by position.
    """
    signature, full = inspect.signature(call), call.__qualname__
    name = full.removesuffix(".__init__").removesuffix(".__call__")

    @functools.wraps(call)
    def told(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}(){_refusal(full, signature, args, kwargs, error)}.") from None
        return call(*args, **kwargs)

    return told


def _refusal(full: str, signature: Any, args: tuple, kwargs: dict, error: TypeError) -> str:
    known = signature.parameters.values()
    called = _CALLED_HERE | _IN.get(full, {})
    for name in kwargs:
        if name not in signature.parameters:
            here = f"; {called[name]}" if name in called else ""
            return f" got an unexpected keyword argument {name!r}{here}"
    places = [each.name for each in known if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(args) > len(places):
        given = [name for name in places if name != "self"]
        more = f" ({_BY_POSITION[full]})" if full in _BY_POSITION else ""
        return f" takes {', '.join(given)} by position, and {len(args) - len(places) + len(given)} came{more}"
    for name, here in _MISSING.items():
        if name in str(error):
            return f" lacks {name}; {here}"
    return f": {error}"


def refuse_vectors(name: str, state: Any, instead: str) -> None:
    """Raises TypeError for vectors that a call in another library's order has in the place of a state."""
    if hasattr(state, "shape"):
        raise TypeError(f"{name} is an array of shape {state.shape}; {instead}.")


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
        fits = jnp.broadcast_shapes(_shape(mask, T, S), full) == full
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(_misfit(mask, full) or f"mask does not fit {full}: {error}") from error
    if not fits:
        raise ValueError(_misfit(mask, full) or f"mask does not fit {full}.")
    return mask


def _shape(mask: Mask, T: int, S: int) -> tuple[int, ...]:
    """Returns the shape of a mask's matrix; where its arrays lie has no part in it."""
    leaves, structure = jax.tree.flatten(mask)
    bare = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    def block(leaves):
        return jax.tree.unflatten(structure, leaves).block(jnp.arange(T), jnp.arange(S))

    return jax.eval_shape(block, bare).shape


def _misfit(mask: Mask, full: tuple[int, ...]) -> str:
    """Says which term of a mask does not broadcast to the call; nothing where each does alone."""
    for term in mask.terms:
        arrays = " and ".join(str(jnp.shape(x)) for x in jax.tree.leaves(term))
        what = f"mask: {type(term).__name__} of {arrays}"
        wanted = f"expected one that broadcasts to [*B N T S] = {full}."
        try:
            shape = _shape(Mask((term,)), *full[-2:])
        except (TypeError, ValueError, IndexError):
            return f"{what} has arrays that do not fit each other; {wanted}"
        if len(shape) > len(full) or any(
            n not in (1, size) for n, size in zip(shape[::-1], full[::-1], strict=False)
        ):
            return f"{what} is {shape}; {wanted}"
    return ""


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
