"""``jax.nn.dot_product_attention``: cuDNN's fused kernel on NVIDIA GPUs, plain XLA elsewhere.

Causal masks, windows to the left and lengths become the kernel's own arguments, so that it skips what
they hide; what else a mask says is a matrix. Alone it breaks three promises: a query that may read
nothing gets the mean of the values, NaN leaks out of masked keys, and an unequal value size is refused.
Here the operands are cleaned first and the result is repaired after (``crossattn.ops.masks.lowering``).

Run here: XLA's implementation, which takes the same arguments. Not run yet: cuDNN with them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from crossattn.ops import platforms
from crossattn.ops.backends import AttentionOutput, few_queries
from crossattn.ops.masks import Mask, lowering
from crossattn.types import Array, Float, Key

REUSES = True
_FORWARD = "dot_product_attention_fwd_wrapper"


def rank(platform: str) -> int | None:
    """Before the reference on GPU; on CPU it is the same einsum with more passes, so by name only."""
    return 10 if platform == "gpu" else None


def unsuited(q: Float[Array, "*B T N H"], k: Float[Array, "*B S K H"]) -> str | None:
    """Why another backend is the better choice for these shapes."""
    if few_queries(q, k):
        return "for few queries, as in decoding, plain products read keys and values where they lie"
    return None


def attend(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K Hv"],
    mask: Mask | None,
    *,
    bias: Float[Array, "*#B #N #T #S"] | None,
    scale: Any,
    softcap: float | Float[Array, ""] | None,
    dropout_rate: float,
    dropout_key: Key[Array, ""] | None,
    return_weights: bool,
    return_lse: bool,
    return_rows: bool = False,
    known: Any = None,
) -> AttentionOutput:
    """See ``crossattn.attend``; for ``known``, ``backends``."""
    _refuse(q, v, softcap, dropout_key, return_weights, return_lse)
    lowered = lowering.lower(mask, q.shape[-3], k.shape[-3])
    matrix = bias is not None or bool(lowered.rest.terms)
    implementation = _implementation(q, k, matrix)
    # XLA's path rounds the weights to the operands' dtype; in float32 there is nothing to round to.
    compute = q.dtype if implementation == "cudnn" else jnp.float32
    dtype, (q, k, v) = q.dtype, (x.astype(compute) for x in (q, k, v))
    prepared = lowering.prepare(q, k, v, bias, mask, lowered)
    operands, keywords = lowering.folded(prepared, lowered, q.shape[:-3])
    if bias is not None:
        operands = (*operands[:3], operands[3].astype(compute), operands[4])
    try:
        options: Any = dict(scale=scale, implementation=implementation)
        kernel: Any = partial(jax.nn.dot_product_attention, **options)
        if known is not None and implementation == "cudnn":
            jax.eval_shape(partial(kernel, *operands, **keywords))  # whether it is here
            out, rows = _again(kernel, operands, keywords, *_folded(known)), None
        elif return_rows and implementation == "cudnn":
            out, lse = _with_lse(kernel, operands, keywords)
            lse = lse.reshape(*q.shape[:-3], q.shape[-2], q.shape[-3])
            rows = lse, jnp.ones_like(lse)
        else:
            out, rows = kernel(*operands, **keywords), None
    except RuntimeError as error:
        if implementation != "cudnn":
            raise
        raise NotImplementedError(f"cuDNN: {error}") from error  # none here, or too old
    out = out.reshape(*q.shape[:-1], v.shape[-1])
    return AttentionOutput(lowering.repair(out, prepared).astype(dtype), rows=rows)


def _folded(known: Any) -> tuple[Array, Array]:
    """Output [B T N Hv] and log-sum-exp [B N T] as the kernel gave them; what was repaired is 0."""
    out, lse = known[0], known[1] + jnp.log(known[2])
    out, lse = (jnp.where(jnp.isfinite(x), x, 0) for x in (out, lse))
    return out.reshape(-1, *out.shape[-3:]), lse.reshape(-1, *lse.shape[-2:])


def _again(kernel: Callable[..., Array], operands: tuple, keywords: dict, out, lse) -> Array:
    """The output, which is known already, with the gradient that cuDNN gives for it.

    JAX has no public name for the backward pass alone: it is taken out of the whole of both.
    """

    @jax.custom_vjp
    def again(operands, keywords, out, lse):
        return out

    def forward(*given):
        return given[2], given

    def backward(given, d_out):
        operands, keywords, out, lse = given
        arrays, whole = operands[:4], operands[4]

        def both(arrays, whole, keywords, d_out):
            return jax.vjp(lambda *a: kernel(*a, whole, **keywords), *arrays)[1](d_out)

        gradients = _evaluate(lambda compute: (out, lse), both, arrays, whole, keywords, d_out)
        return (*gradients, None), None, None, None

    again.defvjp(forward, backward)
    traced, static = _by_kind(keywords)
    kernel = partial(kernel, **static)
    return again(operands, traced, out.astype(operands[0].dtype), lse)


def _with_lse(kernel: Callable[..., Any], operands: tuple, keywords: dict) -> tuple[Array, Array]:
    """Output and log-sum-exp [B N T]; from JAX's interface it comes rounded to the operands' type."""
    kept = []

    def keep(compute: Callable[[], list[Array]]) -> list[Array]:
        kept.append(compute())
        return kept[-1]

    traced, static = _by_kind(keywords)

    def trained(arrays, whole, traced):
        return jax.vjp(lambda *a: kernel(*a, whole, **static, **traced), *arrays)[0]

    out = _evaluate(keep, trained, operands[:4], operands[4], traced)
    return out, kept[-1][1]


def _by_kind(keywords: dict) -> tuple[dict, dict]:
    """Arrays, and what is not."""
    arrays = {name: x for name, x in keywords.items() if hasattr(x, "dtype")}
    return arrays, {name: x for name, x in keywords.items() if name not in arrays}


def _evaluate(forward: Callable[[Callable], Any], call: Callable, *arguments: Any) -> Any:
    """``call`` of arguments, where ``forward`` says what cuDNN's forward kernel gives."""
    traced, shapes = jax.make_jaxpr(call, return_shape=True)(*arguments)
    results = _run(forward, traced, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _run(forward: Callable[[Callable], Any], traced: Any, arguments: list[Any]) -> list[Any]:
    values = dict(zip(traced.jaxpr.invars, arguments, strict=True))
    values |= dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for equation in traced.jaxpr.eqns:
        given = [read(x) for x in equation.invars]

        def compute(equation: Any = equation, given: list[Any] = given) -> list[Any]:
            if equation.primitive.name in ("jit", "pjit"):
                return _run(forward, equation.params["jaxpr"], given)
            parameters = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*given, **parameters)
            return results if equation.primitive.multiple_results else [results]

        if equation.primitive.name == _FORWARD:
            shapes = [x.aval for x in equation.outvars]
            results = zip(forward(compute), shapes, strict=True)
            results = [x.reshape(kind.shape).astype(kind.dtype) for x, kind in results]
        else:
            results = compute()
        values |= dict(zip(equation.outvars, results, strict=True))
    return [read(x) for x in traced.jaxpr.outvars]


def _implementation(q: Array, k: Array, matrix: bool) -> str:
    if platforms.platform() != "gpu":
        return "xla"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"cuDNN attention takes bfloat16 or float16, not {q.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        raise NotImplementedError(
            f"cuDNN attention takes head sizes 8, 16, .. 128, not {q.shape[-1]}"
        )
    if matrix and (q.shape[-3] % 2 or k.shape[-3] % 2):
        raise NotImplementedError(
            "cuDNN attention has no gradient for odd lengths under a bias or a mask that is a matrix"
        )
    return "cudnn"


def _refuse(q: Array, v: Array, softcap, dropout_key, weights: bool, lse: bool) -> None:
    if weights:
        raise NotImplementedError("jax.nn.dot_product_attention does not return weights")
    if lse:
        raise NotImplementedError("the log-sum-exp of jax.nn.dot_product_attention has no gradient")
    if softcap is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no softcap")
    if dropout_key is not None:
        raise NotImplementedError("jax.nn.dot_product_attention has no dropout")
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError(
            "jax.nn.dot_product_attention needs values of the keys' head size"
        )
    if q.dtype == jnp.float64:
        raise NotImplementedError("jax.nn.dot_product_attention computes its softmax in float32")
