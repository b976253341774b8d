"""Losses on cross-attention weights, summed over tokens like those of ``losses.py``.

``attention`` [*B T S] is the mean over the heads of a layer. For lengths at which no such matrix fits in
memory, ``guided_spans`` and ``coverage`` read the statistics of ``crossattn.attention_stats``. Each loss
returns its sum over tokens, and {its name: the same sum without gradient}.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Weights = Int[Array, "*B T"] | Bool[Array, "*B T"] | Float[Array, "*B T"]
Loss = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]


def diagonal_prior(
    target_positions: Int[Array, "*B T"],
    source_positions: Int[Array, "*B S"],
    target_segment_ids: Int[Array, "*B T"],
    source_segment_ids: Int[Array, "*B S"],
    sharpness: float,
) -> Float[Array, "*B T S"]:
    """Returns distributions over each target token's sentence that favour the same relative place.

    Args:
        target_positions, source_positions: place of each token in its sentence, from 0.
        target_segment_ids, source_segment_ids: sentence of each token, 0 for padding, which gets all 0.
        sharpness: exp(-sharpness |t / T - s / S|), up to a factor; 0 is even.
    Source: Dyer et al. 2013, "A simple, fast, and effective reparameterization of IBM model 2".
    """

    def same(left: Array, right: Array) -> Array:
        return (left[..., :, None] == right[..., None, :]) & (right[..., None, :] > 0)

    readable = same(target_segment_ids, source_segment_ids)
    S = jnp.maximum(readable.sum(-1, keepdims=True), 1)
    T = jnp.maximum(same(target_segment_ids, target_segment_ids).sum(-1, keepdims=True), 1)
    far = jnp.abs(target_positions[..., :, None] / T - source_positions[..., None, :] / S)
    near = jnp.where(readable, jnp.exp(-sharpness * far), 0.0)
    return near / jnp.maximum(near.sum(-1, keepdims=True), 1e-9)


def placed_prior(
    places: Float[Array, "*B T"], source_segment_ids: Int[Array, "*B S"], width: float
) -> Float[Array, "*B T S"]:
    """Returns normal distributions over source places, around those that are known for each target place.

    Args:
        places: where the mean is, which need not be whole.
        source_segment_ids: 1 for a place of the pair, 0 for padding, which gets 0.
        width: standard deviation, in places.
    """
    far = places[..., :, None] - jnp.arange(source_segment_ids.shape[-1])
    there = source_segment_ids[..., None, :] > 0
    near = jax.nn.softmax(jnp.square(far / width) / -2.0, axis=-1, where=there)
    return jnp.where(there, near, 0.0)  # where nothing is there, softmax is NaN


def latent_alignment(
    scores: Float[Array, "*B T S"],
    prior: Float[Array, "*B T S"],
    posterior: Float[Array, "*B T S"],
    weights: Weights,
) -> Loss:
    """Teaches attention to align words from sentence pairs alone, without links.

    Each target token translates one unknown source token: p(y_t) = sum_s prior[t, s] p(y_t | x_s). The
    negative log-likelihood trains the prior and the word translations. The attention that has seen y_t
    learns the posterior, prior[t, s] p(y_t | x_s) / p(y_t), by cross-entropy.

    A mixture of probabilities, not of vectors, keeps attention from passing a code through its weights. The
    posterior is exact: a variational one was seen to collapse onto the prior.

    Args:
        scores: log p(y_t | x_s), target token t under source token s alone.
        prior: probability of s before y_t is known; 0 where s is not in the sentence of t.
        posterior: attention weights of the row whose input is y_t.
        weights: weight of each target token, 0 for padding.

    Returns:
        The loss, and {"alignment": the negative log-likelihood}.

    Source: Brown et al. 1993, models 1 and 2, with attention for the parameters.
    """
    possible = prior > 0
    # log(1), because the gradient of log(0) would be NaN.
    joint = jnp.where(possible, jnp.log(jnp.where(possible, prior, 1.0)) + scores, -1e9)
    log_p = jax.nn.logsumexp(joint, axis=-1)
    exact = jax.lax.stop_gradient(jnp.exp(joint - log_p[..., None]))
    learnt = -jnp.sum(exact * jnp.log(jnp.maximum(posterior, 1e-9)), axis=-1)
    nll, learnt = _total(-log_p, weights), _total(learnt, weights)
    return nll + learnt, {"alignment": jax.lax.stop_gradient(nll)}


def guided_alignment(
    attention: Float[Array, "*B T S"],
    links: Int[Array, "*B T A"],
    source_words: Int[Array, "*B S"],
) -> Loss:
    """Teaches attention given links: cross-entropy with an even distribution over the linked words.

    The attention on a word is the sum over its tokens.

    Args:
        attention: weights of the row that has read (or that predicts) each target token.
        links: source places that the token is linked with, each once, and -1 for the rest. Tokens without
            a link are ignored.
        source_words: the word of each source place; differs between the linked words of a token.

    Source: Chen et al. 2016, "Guided alignment training for topic-aware neural machine
        translation"; Garg et al. 2019, "Jointly learning to align and translate".
    """
    linked = links >= 0
    place = jnp.where(linked, links, 0)
    word = jnp.take_along_axis(source_words[..., None, :], place, axis=-1)
    together = (
        (word[..., :, None] == word[..., None, :]) & linked[..., :, None] & linked[..., None, :]
    )
    probabilities = jnp.take_along_axis(attention, place, axis=-1)
    mass = jnp.sum(jnp.where(together, probabilities[..., None, :], 0.0), axis=-1)
    share = linked / jnp.maximum(together.sum(-1), 1)  # of a token in its word; they sum to 1
    surprise = -share * jnp.log(jnp.maximum(mass, 1e-9))
    loss = jnp.sum(surprise.sum(-1) / jnp.maximum(share.sum(-1), 1))
    return _named("guided", loss)


def guided_columns(attention: Float[Array, "*B T S"], linked: Bool[Array, "*B T S"]) -> Loss:
    """Teaches attention the links in the other direction, from each source token to target tokens.

    The loss of a source token is minus the log of its linked share of the sum of its column.

    Args:
        attention: weights of the rows that ``guided_alignment`` teaches, others 0.
        linked: whether the target and the source token are linked. Source tokens without a link are
            ignored.

    Source: the two directions' agreement of Liang et al. 2006, "Alignment by agreement", with one
        attention for both.
    """
    whole = jnp.maximum(attention.sum(-2), 1e-9)
    part = jnp.maximum(jnp.where(linked, attention, 0.0).sum(-2), 1e-9)
    loss = jnp.sum(jnp.where(linked.any(-2), jnp.log(whole / part), 0.0))
    return _named("columns", loss)


def prior_alignment(
    attention: Float[Array, "*B T S"], prior: Float[Array, "*B T S"], weights: Weights
) -> Loss:
    """Teaches attention a prior such as ``diagonal_prior`` or ``placed_prior``, by cross-entropy.

    Args:
        attention: weights of the rows that learn the prior.
        prior: sums to 1 over S, or is all 0 for a row to ignore.
        weights: weight of each row, 0 for padding.

    Source: the supervision of Chen et al. 2016, "Guided alignment training for topic-aware neural machine
        translation", with a distribution in place of links: the diagonal of Dyer et al. 2013, or known times,
        as Zhu et al. 2019, "Pre-alignment guided attention for improving training efficiency and model
        stability in end-to-end speech synthesis".
    """
    surprise = -jnp.sum(prior * jnp.log(jnp.maximum(attention, 1e-9)), axis=-1)
    return _named("prior", _total(surprise, weights))


def placed_attention(
    weights: Float[Array, "L *B N T S"],
    places: Float[Array, "*B T"],
    target_segment_ids: Int[Array, "*B T"],
    source_segment_ids: Int[Array, "*B S"],
    width: float,
) -> Loss:
    """Teaches every layer to read known source places: ``prior_alignment`` with ``placed_prior``.

    Args:
        weights: cross-attention of all layers, whose mean over heads is taught.
        places: the source place of each target token, which need not be whole.
        target_segment_ids, source_segment_ids: 1 for a place of the pair, 0 for padding.
        width: standard deviation, in places.

    Returns:
        The mean over layers, and {"placed": the same}.
    """
    prior = placed_prior(places, source_segment_ids, width)
    layers = [prior_alignment(own, prior, target_segment_ids > 0)[0] for own in weights.mean(-3)]
    return _named("placed", sum(layers[1:], layers[0]) / len(layers))


def guided_spans(span_mass: Float[Array, "*B T"], weights: Weights) -> Loss:
    """Teaches attention links that are spans of keys: the negative log of the attention on each span.

    Args:
        span_mass: attention of each target token on the span that it is linked with, the mean over heads of
            ``attention_stats(..., spans=(first, last)).span_mass``.
        weights: weight of each target token, 0 for padding and for tokens without a link.

    Source: as ``guided_alignment``, to which it is equal if a word's tokens are adjacent.
    """
    return _named("guided", _total(-jnp.log(jnp.maximum(span_mass, 1e-9)), weights))


def diagonal_attention(
    attention: Float[Array, "*B T S"],
    target_segment_ids: Int[Array, "*B T"],
    source_segment_ids: Int[Array, "*B S"],
    width: float = 0.2,
) -> Loss:
    """Penalises attention far from the diagonal, for pairs in the same order, such as letters and sound.

    The loss of the weight of source place s in row t is 1 - exp(-(t / T - s / S)^2 / (2 width^2)), where T
    and S are the lengths of the pair, one in each row of the batch.

    Args:
        attention: weights, which sum to 1 over S.
        target_segment_ids, source_segment_ids: 1 for a place of the pair, 0 for padding, which follows it.
        width: relative distance at which the loss is 0.4.

    Returns:
        The loss, and {"diagonal": the sum of the same}.

    Source: guided attention, Tachibana et al. 2017, "Efficiently trainable text-to-speech system based on
        deep convolutional networks with guided attention", section 4.1; their width is 0.2.
    """
    far = relative_distance(target_segment_ids, source_segment_ids)
    penalty = (1.0 - jnp.exp(-jnp.square(far / width) / 2.0)) * attention
    readable = (target_segment_ids > 0)[..., :, None] & (source_segment_ids > 0)[..., None, :]
    return _named("diagonal", jnp.sum(jnp.where(readable, penalty, 0.0)))


def relative_distance(
    target_segment_ids: Int[Array, "*B T"], source_segment_ids: Int[Array, "*B S"]
) -> Float[Array, "*B T S"]:
    """Returns |t / T - s / S| of the places of pairs, one in each row; any number for padding."""

    def relative(segment_ids: Array) -> Array:
        length = jnp.maximum((segment_ids > 0).sum(-1, keepdims=True), 1)
        return jnp.arange(segment_ids.shape[-1]) / length

    target, source = relative(target_segment_ids), relative(source_segment_ids)
    return jnp.abs(target[..., :, None] - source[..., None, :])


def coverage(
    mass: Float[Array, "*B S"],
    valid: Bool[Array, "*B S"],
    expected: Float[Array, "*#B #S"] | float | int = 1.0,
) -> Loss:
    """Penalises uneven attention over the source: the squared error of each source token's total.

    Args:
        mass: attention on each source token, summed over target tokens: ``attention.sum(-2)``, or the mean
            over heads of ``attention_stats(...).mass``.
        valid: padding mask of the source.
        expected: the total to reach; the paper's 1, or target tokens per source token.

    Source: doubly stochastic attention, Xu et al. 2015, "Show, attend and tell", equation 14.
    """
    return _named("coverage", jnp.sum(jnp.where(valid, jnp.square(expected - mass), 0.0)))


def _total(values: Array, weights: Array) -> Array:
    """Sums over tokens by weight; a weight of 0 hides NaN."""
    return jnp.sum(jnp.where(weights > 0, values * weights, 0.0))


def _named(name: str, loss: Array) -> Loss:
    return loss, {name: jax.lax.stop_gradient(loss)}
