"""The one function that everything goes through: ``attend(q, k, v, mask)``.

It checks its arguments, then hands them to the first backend that keeps the contract for this call.
"""

from typing import Any

import jax
import jax.numpy as jnp

from crossattn.ops import backends
from crossattn.ops.masks import Mask, as_mask
from crossattn.types import AnyArray, Array, Bool, Float, Key


def attend(
    q: Float[AnyArray, "*B T N H"],
    k: Float[AnyArray, "*B S K H"],
    v: Float[AnyArray, "*B S K Hv"],
    mask: Mask | Bool[AnyArray, "..."] | None = None,
    *,
    bias: Float[AnyArray, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    softcap: float | Float[Array, ""] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    backend: str | None = None,
    return_weights: bool = False,
    return_lse: bool = False,
) -> Any:
    """Scaled dot-product attention: ``softmax(scale * q k^T + bias, over what mask allows) v``.

    Logits, softmax and sums are float32 at least. A query that may read nothing yields exactly 0,
    with gradients 0; NaN or Inf in a key or value reaches only the queries that may read it.

    Fused backends (``cpu``, cuDNN) differentiate in reverse mode only; for ``jax.jvp`` or ``jax.hessian``
    ask for ``backend="reference"``.

    Args:
      q: queries [*B T N H], any number of leading batch axes.
      k: keys [*B S K H]; N is a multiple of K, consecutive query heads share a key head.
      v: values [*B S K Hv].
      mask: a ``Mask``, or a boolean array [*#B #N #T #S], True = this query may read this key. All
        axes are there, of size 1 where shared: three axes could mean [B T S] or [N T S].
      bias: [*#B #N #T #S], likewise, added to the scaled logits; -inf masks.
      scale: factor on the logits; None is ``H ** -0.5``.
      softcap: c, for logits ``c * tanh(logits / c)``, before the bias.
      dropout_rate: probability of dropping a weight; needs ``dropout_key`` when above 0.
      dropout_key: a JAX random key.
      backend: a name from ``crossattn.ops.backends``, or None for the first that fits.
      return_weights: also return the weights, before dropout. Fused kernels never have them, so another
        backend may run, and the output differ in its last bits.

      return_lse: also return log sum exp of the logits that each query may read, -inf where it may
        read nothing; differentiable. ``merge`` puts parts of a memory together with it.

    Returns:
      The output [*B T N Hv] in q's dtype; a tuple when more is asked for: then the float32 weights
      [*B N T S], then the float32 log-sum-exp [*B N T].

    Raises:
      ValueError: an argument's shape, dtype or value does not fit; the message names it.
      NotImplementedError: the backend asked for by name cannot keep the contract for this call.

    Source: Vaswani et al. 2017, equation 1; grouped heads, Ainslie et al. 2023; softcap, Gemma 2.
    """
    _check_operands(q, k, v)
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    batch, T, N, S = q.shape[:-3], q.shape[-3], q.shape[-2], k.shape[-3]
    full = (*batch, N, T, S)
    if mask is not None:
        if not isinstance(mask, Mask):
            _check_broadcast("mask", mask, full, bool)
        mask = as_mask(mask)
        mask = mask if mask.terms else None
    if mask is not None:
        _check_mask(mask, full)
    if bias is not None:
        _check_broadcast("bias", bias, full, jnp.floating)
        bias = jnp.asarray(bias)
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate is {dropout_rate}; expected 0 <= rate < 1.")
    if dropout_rate > 0 and dropout_key is None:
        raise ValueError(
            f"dropout_rate is {dropout_rate} but dropout_key is None; pass a jax.random.key, or rate 0."
        )
    if S == 0:
        out = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        weights = jnp.zeros(full, jnp.float32) if return_weights else None
        lse = jnp.full(full[:-1], -jnp.inf) if return_lse else None
        return _asked_for(backends.Attended(out, weights, lse))
    arguments = dict(
        bias=bias,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key if dropout_rate > 0 else None,
        return_weights=return_weights,
        return_lse=return_lse,
    )
    return _asked_for(_run(backend, q, k, v, mask, arguments))


def _asked_for(found: backends.Attended) -> Any:
    extras = tuple(x for x in found[1:] if x is not None)
    return (found.out, *extras) if extras else found.out


def _run(backend: str | None, q: Array, k: Array, v: Array, mask: Mask | None, arguments: dict):
    if backend is not None:
        return backends.get(backend).attend(q, k, v, mask, **arguments)
    refusals = []
    for name in backends.ordered(jax.default_backend()):
        try:
            return backends.get(name).attend(q, k, v, mask, **arguments)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
    raise NotImplementedError("no backend takes this call; " + "; ".join(refusals))


def _check_operands(q: AnyArray, k: AnyArray, v: AnyArray) -> None:
    for name, x, axes in (("q", q, "[*B T N H]"), ("k", k, "[*B S K H]"), ("v", v, "[*B S K Hv]")):
        if jnp.ndim(x) < 3:
            raise ValueError(f"{name} has shape {jnp.shape(x)}; expected at least 3 axes, {axes}.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}; expected a floating-point dtype.")
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
        raise ValueError(
            f"q has {q.shape[-2]} heads and k has {k.shape[-2]}; expected q's to be a multiple of k's."
        )


def _check_broadcast(name: str, x: AnyArray, full: tuple[int, ...], kind) -> None:
    dtype = getattr(x, "dtype", None)
    wanted = "bool" if kind is bool else "a floating-point dtype"
    if dtype is None or not jnp.issubdtype(dtype, jnp.bool_ if kind is bool else kind):
        other = "bias" if kind is bool else "mask"
        raise ValueError(
            f"{name} has dtype {dtype}; expected {wanted} (did you mean {other}=?). "
            "mask is boolean, True = may be read; bias is added to the logits."
        )
    if x.ndim != len(full) or any(n not in (1, m) for n, m in zip(x.shape, full, strict=True)):
        raise ValueError(
            f"{name} has shape {x.shape}; expected {len(full)} axes [*B N T S] = {full}, each of that "
            "size or 1."
        )


def _check_mask(mask: Mask, full: tuple[int, ...]) -> None:
    """The terms' arrays must fit this call; found out from shapes alone, nothing is computed."""
    T, S = full[-2:]
    mask.check(T, S)
    try:
        shape = jax.eval_shape(lambda m: m.block(jnp.arange(T), jnp.arange(S)), mask).shape
        fits = jnp.broadcast_shapes(shape, full) == full
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"mask does not fit [*B N T S] = {full}: {error}") from error
    if not fits:
        raise ValueError(
            f"mask has shape {shape}; expected one that broadcasts to [*B N T S] = {full}."
        )
