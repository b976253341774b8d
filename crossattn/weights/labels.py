"""The decoder's input that predicts its labels: the labels, one position later."""

import jax.numpy as jnp

from crossattn.types import AnyArray, Array, Int

IGNORED = -100
"""A label that no loss counts."""


def shift_right(labels: Int[AnyArray, "B T"], start_id: int, pad_id: int) -> Int[Array, "B T"]:
    """``start_id``, then all labels but the last; padding where a label is ignored."""
    tokens = jnp.where(labels == IGNORED, pad_id, labels)
    return jnp.concatenate([jnp.full_like(tokens[:, :1], start_id), tokens[:, :-1]], axis=1)


def last_first(labels: Int[AnyArray, "B T"], pad_id: int) -> Int[Array, "B T"]:
    """The last token that is no padding, then all labels but the last.

    mBART's and PLBart's labels end with the language's code, and the decoder starts from it.
    """
    tokens = jnp.where(labels == IGNORED, pad_id, labels)
    last = jnp.sum(tokens != pad_id, axis=1, keepdims=True) - 1
    return jnp.concatenate([jnp.take_along_axis(tokens, last, axis=1), tokens[:, :-1]], axis=1)
