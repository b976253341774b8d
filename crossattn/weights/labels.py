"""Makes the input of a decoder from its labels."""

import jax.numpy as jnp

from crossattn.types import AnyArray, Array, Int

IGNORED = -100
"""A label that no loss counts."""


def shift_right(labels: Int[AnyArray, "B T"], start_id: int, pad_id: int) -> Int[Array, "B T"]:
    """Returns ``start_id``, then all labels but the last; padding where a label is ignored."""
    tokens = jnp.where(labels == IGNORED, pad_id, labels)
    return jnp.concatenate([jnp.full_like(tokens[:, :1], start_id), tokens[:, :-1]], axis=1)


def last_first(labels: Int[AnyArray, "B T"], pad_id: int) -> Int[Array, "B T"]:
    """Returns the last token that is no padding, then all labels but the last.

    The labels of mBART and PLBart end with the language's code, from which the decoder starts.
    """
    tokens = jnp.where(labels == IGNORED, pad_id, labels)
    last = jnp.sum(tokens != pad_id, axis=1, keepdims=True) - 1
    return jnp.concatenate([jnp.take_along_axis(tokens, last, axis=1), tokens[:, :-1]], axis=1)
