"""The one function that everything goes through: ``attend(q, k, v, mask)``.

The way of a call, each step in one file:

    attend            checks its arguments (arguments.py) and makes one value of them: ``Call`` (call.py)
      |
    primitive.py      stands in the program as one operation, until the platform is known (platforms.py);
      |               in reverse mode as a second one, by derivative.py, which is told what the first found
      |
    spread.py         asks on which mesh the arrays lie (placement.py), and gives each device its part
      |
    backends          the first that keeps the contract for the call runs; the others have said why not

Weights, dropout and lengths that are symbols leave out the second step, and arrays on Explicit mesh axes,
whose places are types, change the second for the third.
"""

from typing import Any, Literal, TypedDict, Unpack, overload

import jax.numpy as jnp

from crossattn.ops import arguments, backends, primitive
from crossattn.ops.backends import Ran, first_that_fits, warn_where_slow
from crossattn.ops.call import AttentionOutput, Call
from crossattn.ops.masks import Mask
from crossattn.ops.parallel import placement, spread
from crossattn.ops.promotion import as_written, widened
from crossattn.types import AnyArray, Array, Bool, Float, Key

_Mask = Mask | Bool[AnyArray, "..."] | None


class _Options(TypedDict, total=False):
    """Keyword arguments that do not change the type of what ``attend`` returns."""

    bias: Float[AnyArray, "..."] | None
    scale: float | Float[Array, ""] | None
    softcap: float | Float[Array, ""] | None
    dropout_rate: float
    dropout_key: Key[Array, ""] | None
    backend: str | None


@overload
def attend(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    mask: _Mask = None,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Array: ...
@overload
def attend(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    mask: _Mask = None,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    **options: Unpack[_Options],
) -> Any: ...


@arguments.in_words_of_here
def attend(
    q: Float[AnyArray, "*B T N H"],
    k: Float[AnyArray, "*B S K H"],
    v: Float[AnyArray, "*B S K Hv"],
    mask: _Mask = None,
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
    """Computes scaled dot-product attention, ``softmax(scale * q k^T + bias) v`` over allowed keys.

    Logits, softmax and sums are float32 at least. A query that may read nothing yields exactly 0,
    with gradients 0; NaN or Inf in a key or value reaches only the queries that may read it.

    The kernel is chosen where the program is lowered, for that platform: one function exports to CPU, GPU
    and TPU, and on a mesh each device runs it on its own examples and heads. It differentiates in
    reverse and forward mode (``jax.jvp``, ``jax.hessian``), to any order; a fused kernel that is asked for
    by name on Explicit mesh axes does so in reverse mode alone. Where neither weights nor dropout are asked
    for, ``jax.linear_transpose`` takes it in v.

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
      backend: a name from ``crossattn.ops.backends``, or None for that of ``xa.use_backend``, and
        outside of it for the first that fits.
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
    ran = run(
        q,
        k,
        v,
        mask,
        backend,
        bias=bias,
        scale=scale,
        softcap=softcap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        return_weights=return_weights,
        return_lse=return_lse,
    )
    if ran.backend is not None:
        warn_where_slow(ran)
    output = ran.attended
    extras = tuple(x for x in output[1:] if x is not None)
    return (output.out, *extras) if extras else output.out


@as_written
def run(
    q,
    k,
    v,
    mask=None,
    backend: str | None = None,
    *,
    bias=None,
    scale=None,
    softcap=None,
    dropout_rate: float = 0.0,
    dropout_key=None,
    return_weights: bool = False,
    return_lse: bool = False,
    late: bool = True,
    wide: bool = False,
) -> Ran:
    """Checks the arguments of ``attend`` and runs the first backend that takes the call.

    With ``late`` that may be left open until the program is lowered, and the result names none; with ``wide``
    the output is float32 at least, of a part that is yet to be merged with others.
    """
    arguments.check_operands(q, k, v)
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    batch, T, N, S = q.shape[:-3], q.shape[-3], q.shape[-2], k.shape[-3]
    full = (*batch, N, T, S)
    mask = arguments.check_mask(mask, full)
    if bias is not None:
        arguments.check_broadcast("bias", bias, full, jnp.floating)
        bias = jnp.asarray(bias)
    arguments.check_number("scale", scale)
    arguments.check_number("softcap", softcap, positive=True)
    arguments.check_dropout(dropout_rate, dropout_key)
    backend = backends.chosen() if backend is None else backend
    if backend is not None:
        backends.get(backend)
    if 0 in full:
        out = jnp.zeros((*q.shape[:-1], v.shape[-1]), widened(q.dtype) if wide else q.dtype)
        weights = jnp.zeros(full, jnp.float32) if return_weights else None
        lse = jnp.full(full[:-1], -jnp.inf) if return_lse else None
        return Ran(AttentionOutput(out, weights, lse))
    if scale is None:
        scale = q.shape[-1] ** -0.5
    key = dropout_key if dropout_rate > 0 else None
    operands = (q, k, v, mask, bias, scale, softcap, key)
    call = Call(
        *operands,
        dropout_rate=dropout_rate,
        return_weights=return_weights,
        return_lse=return_lse,
        wide=wide,
        backend=backend,
    )
    late = late and primitive.suits(call)
    # Places that types say matter now; any others are asked for where the program is lowered.
    mesh = placement.mesh_of(operands) if late else placement.attended_on(operands)
    if not placement.is_explicit(mesh):
        return primitive.attend(call) if late else spread.attend(first_that_fits, mesh, call)
    # A kernel that is named may refuse to give what parts are merged by: that shows while it is traced.
    run_part = primitive.attend if late and backend is None else first_that_fits
    return spread.attend(run_part, mesh, call)
