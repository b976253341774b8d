"""Scores of how much a target token rests on a source token [B T S]: plain weights, and what corrects them.

    mean_weights            w, the mean over layers and heads
    value_weighted_norms    |sum_n w_n v_n W_n|, the size of what the heads add     Kobayashi et al. 2020
    rollout                 products of (w + 1) / 2 through both stacks             Abnar and Zuidema 2020
    gradient_times_weight   d log p(y_t) / d r_s at r = 1
    integrated_gradients    the mean of the same on the way from r = 0 to r = 1     Sundararajan et al. 2017
    leave_one_out           log p(y_t | x) - log p(y_t | x without s)
    passage_slopes          gradient_times_weight of the passages that a ``Retro`` reads

r_s multiplies all weights on source token s: it is a scale on the values of the memory, an intervention.
``leave_one_out`` masks the token in the encoder too; it is what the others are held to. All take an
encoder-decoder whose stacks are ``encoder`` and ``decoder``, and one pair a row; ``passage_slopes`` takes a
decoder that reads passages, and windows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.interventions import Intervention, run, sites
from crossattn.nn import DecoderStack
from crossattn.types import AnyArray, Array, Float, Shaped

Pairs = Mapping[str, Any]
"""Arrays ``source`` [B S], ``target_in``, ``target_out`` [B T]; ``segment_ids`` of both, 0 for padding."""

_CROSS, _CHUNKED = "decoder.cross", "decoder.chunked"
_SEGMENTS = ("source_segment_ids", "target_segment_ids")
_TOGETHER = 8  # source tokens of a forward derivative, which have one forward pass


def mean_weights(model: Any, pairs: Pairs) -> Float[Array, "B T S"]:
    """Computes the mean of cross-attention's weights over layers and heads."""
    return _captured(model, pairs, f"{_CROSS}.weights")[0].mean((0, 2))


def value_weighted_norms(model: Any, pairs: Pairs) -> Float[Array, "B T S"]:
    """Computes the norm of what the heads add for each source token, the mean over layers.

    Source: Kobayashi et al. 2020, "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms",
      equation 5.
    """
    weights, values = _captured(model, pairs, f"{_CROSS}.weights", f"{_CROSS}.values")
    stack: DecoderStack = model.decoder
    kernels = [block.cross.out.kernel.get_value() for block in stack.stack.blocks()]
    norms = []
    for w, v, kernel in zip(weights, values, kernels, strict=True):
        v = jnp.repeat(v, kernel.shape[0] // v.shape[-2], axis=-2)
        added = jnp.einsum("bsnh,nhd->bsnd", v, kernel)
        # |sum_n w_n a_n|^2 = sum_nm w_n w_m <a_n, a_m>, without vectors [B T S D].
        products = jnp.einsum("bsnd,bsmd->bsnm", added, added)
        norms.append(jnp.sqrt(jnp.maximum(jnp.einsum("bnts,bmts,bsnm->bts", w, w, products), 0)))
    return jnp.stack(norms).mean(0)


def rollout(model: Any, pairs: Pairs) -> Float[Array, "B T S"]:
    """Computes the source's share of each target vector, were all layers means of what they read.

    A residual connection counts half, the sublayer's weights the other half. The rest, to a sum of 1, is the
    share of the target before the token.

    Source: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers", equation 1, carried on from
      the encoder through the decoder.
    """
    names = ("encoder.attention", "decoder.attention", _CROSS)
    own, back, across = _captured(model, pairs, *(f"{name}.weights" for name in names))
    source = jnp.eye(own.shape[-1])
    for w in own.mean(2):
        source = (source + w @ source) / 2
    share = jnp.zeros(across.shape[1:2] + across.shape[3:])
    for w, c in zip(back.mean(2), across.mean(2), strict=True):
        share = (share + w @ share) / 2
        share = (share + c @ source) / 2
    return share


def gradient_times_weight(model: Any, pairs: Pairs) -> Float[Array, "B T S"]:
    """Computes the slope of each token's log-likelihood for the weights on a source token, times them."""
    return _slopes(model, pairs, jnp.ones(()))


def integrated_gradients(model: Any, pairs: Pairs, steps: int = 8) -> Float[Array, "B T S"]:
    """Computes the mean slope while the weights on all source tokens grow from 0 to what they are.

    Its sum over the source is the log-likelihood less that without the source's values, but for the error of
    the midpoint rule of so many steps.

    Source: Sundararajan et al. 2017, "Axiomatic Attribution for Deep Networks", equation 3.
    """
    at = (jnp.arange(steps) + 0.5) / steps
    return jax.lax.map(lambda part: _slopes(model, pairs, part), at).mean(0)


def leave_one_out(model: Any, pairs: Pairs) -> Float[Array, "B T S"]:
    """Computes how much less likely each target token is where a source token is masked, everywhere."""
    segments = jnp.asarray(pairs["source_segment_ids"])
    S = segments.shape[-1]

    def without(place: Array) -> Array:
        masked = jnp.where(jnp.arange(S) == place, 0, segments)
        return log_likelihoods(model, {**pairs, "source_segment_ids": masked})

    lost = log_likelihoods(model, pairs) - jax.lax.map(without, jnp.arange(S))
    return jnp.moveaxis(lost, 0, -1)


def log_likelihoods(model: Any, pairs: Pairs, edits: Any = None) -> Float[Array, "B T"]:
    """Computes the log-probability of each target token, 0 for padding, with interventions."""
    hidden, _ = run(model, edits, **_inputs(pairs), method="hidden")
    return _told(model.logits(hidden), pairs)


def passage_slopes(model: Any, windows: Mapping[str, Any]) -> Float[Array, "B T K"]:
    """Computes slopes of each token's log-likelihood for the weights on passage k of all chunks, times them.

    It says on which passage a token rests, which the mass of attention does not: of planted passages the one
    with the greatest slope is the one whose absence costs most at 99 % of places, by mass at 58 %
    (``retro.py:tiny``, 250 steps).

    Args:
      model: a ``Retro``.
      windows: arrays ``target_in``, ``target_out``, ``target_segment_ids`` [B T], 0 for padding, and
        ``neighbours`` [B C K R].

    Raises:
      ValueError: the decoder reads no passages.
    """
    site, (K, R) = f"{_CHUNKED}.values", windows["neighbours"].shape[-2:]
    if (own := sites(model).get(site)) is None:
        raise ValueError(
            f"{type(model).__name__} has no {site}; expected a model that reads passages."
        )
    layers = own.layers
    tokens, neighbours, segments = (
        jnp.asarray(windows[name]) for name in ("target_in", "neighbours", "target_segment_ids")
    )

    def told(scale: Array) -> Array:
        values = Intervention(scale=jnp.broadcast_to(jnp.repeat(scale, R), (layers, K * R)))
        given = dict[str, Any](neighbours=neighbours, segment_ids=segments)
        hidden = run(model, {site: values}, tokens, **given, method="hidden")
        return _told(model.logits(hidden), windows)

    return _derivatives(told, jnp.ones(K))


SCORES = {
    "weights, mean of heads and layers": mean_weights,
    "value-weighted norms": value_weighted_norms,
    "rollout": rollout,
    "gradient times weight": gradient_times_weight,
    "integrated gradients": integrated_gradients,
    "leave one out": leave_one_out,
}
"""By name; the last one is the reference."""


def spearman(one: Shaped[np.ndarray, " S"], other: Shaped[np.ndarray, " S"]) -> float:
    """Computes the rank correlation of two lists, with mean ranks for ties; NaN for a constant list."""
    ranks = [_ranks(np.asarray(x)) for x in (one, other)]
    centred = [r - r.mean() for r in ranks]
    size = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return float(centred[0] @ centred[1] / size) if size else float("nan")


def kendall(one: Shaped[np.ndarray, " S"], other: Shaped[np.ndarray, " S"]) -> float:
    """Computes Kendall's tau-b, pairs in the same order less those turned round; NaN for a constant list."""
    signs = [np.sign(np.subtract.outer(x, x)) for x in (np.asarray(one), np.asarray(other))]
    size = np.sqrt((signs[0] ** 2).sum() * (signs[1] ** 2).sum())
    return float((signs[0] * signs[1]).sum() / size) if size else float("nan")


def _ranks(x: np.ndarray) -> np.ndarray:
    less, same = (x[None] < x[:, None]).sum(1), (x[None] == x[:, None]).sum(1)
    return less + (same - 1) / 2


def _slopes(model: Any, pairs: Pairs, part: Float[AnyArray, ""]) -> Float[Array, "B T S"]:
    """Computes derivatives of log-likelihoods for scales on the values, where all scales are ``part``."""
    layers = sites(model)[f"{_CROSS}.values"].layers
    S = jnp.asarray(pairs["source"]).shape[-1]

    def told(scale: Array) -> Array:
        values = Intervention(scale=jnp.broadcast_to(scale, (layers, S)))
        return log_likelihoods(model, pairs, {f"{_CROSS}.values": values})

    return _derivatives(told, jnp.full(S, part))


def _derivatives(told: Callable[[Array], Array], at: Float[Array, " S"]) -> Float[Array, "B T S"]:
    # What a row reads moves its own likelihoods alone, so one direction serves all rows.
    slope = lambda way: jax.jvp(told, (at,), (way,))[1]  # noqa: E731
    return jnp.moveaxis(jax.lax.map(slope, jnp.eye(len(at)), batch_size=_TOGETHER), 0, -1)


def _told(logits: Array, pairs: Pairs) -> Float[Array, "B T"]:
    """Returns the log-probability of each target token, 0 for padding."""
    found = jax.nn.log_softmax(logits)
    told = jnp.take_along_axis(found, jnp.asarray(pairs["target_out"])[..., None], -1)[..., 0]
    return jnp.where(jnp.asarray(pairs["target_segment_ids"]) > 0, told, 0)


def _captured(model: Any, pairs: Pairs, *names: str) -> list[Array]:
    _, found = run(model, None, **_inputs(pairs), capture=names, method="hidden")
    return [found[name] for name in names]


def _inputs(pairs: Pairs) -> dict[str, Any]:
    return {name: jnp.asarray(pairs[name]) for name in ("source", "target_in", *_SEGMENTS)}
