"""Attention between sound and text that learns from the times of letters when each is said.

An example's "times" are the seconds at which each of its letters begins, and the last ends. A task turns them
into "place", the place of the memory that each place of the target should read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jaxtyping import Array, Float

from crossattn.data.errors import DataError
from crossattn.train.alignment_losses import placed_attention
from crossattn.types import NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class AlignmentInTime:
    """The loss of attention elsewhere than where its target is said.

    Attributes:
      alignment: what teaches attention: nothing, or the times of letters, which examples have.
      alignment_weight: weight of that loss.
      alignment_width: standard deviation of the weights that times teach, in places of the memory: letters,
        or vectors of a Whisper's encoder, of which a second has fifty.
    """

    alignment: Literal["none", "times"] = "none"
    alignment_weight: NonNegative = 1.0
    alignment_width: Positive = 1.0


def refuse_other_times(example: Mapping[str, Any], letters: int) -> None:
    """Raises DataError where the times of an example are not those of so many letters, and the last's end."""
    if (count := len(example["times"])) != letters + 1:
        raise DataError(
            f"example {example['id']} has {count} times; its text has {letters} letters, which expect"
            f" {letters + 1}: when each begins, and the last ends."
        )


def times_loss(
    weights: Float[Array, "L B N T S"],
    batch: Mapping[str, Any],
    source_segment_ids: Any,
    options: AlignmentInTime,
) -> jax.Array:
    """Returns ``placed_attention`` of the places of a batch, summed over its target, times its weight."""
    places, there = batch["place"][..., 0], batch["target_segment_ids"]
    loss, _ = placed_attention(weights, places, there, source_segment_ids, options.alignment_width)
    return options.alignment_weight * loss
