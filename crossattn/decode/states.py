"""The decoding protocol: all that searches ask of a model and of its states, whatever is inside them.

A model that generates has

    states = model.prefill(batch, num_beams, cache_length, **inputs)
    logits, states = model.decode_step(tokens, states)

The first reads what the model reads, once, for ``num_beams`` sequences a row. The second reads the next T
tokens [B J T] of each and gives logits [B J T V] of what follows, and states of the same structure.
"""

from collections.abc import Callable
from typing import Any, Protocol

from crossattn.types import Array, Bool, Int

DecodeStep = Callable[..., tuple]
"""``(tokens [B J T], states) -> (logits [B J T V], states)``.

With ``return_weights=True``, for ``Capture``, it gives weights [L B J N T S] of cross-attention as well.
"""


class DecodingStates(Protocol):
    """What a model carries from step to step: a pytree of arrays. A search needs only what it says it does.

    Greedy decoding and sampling need nothing of the below.
    """

    def select(self, parents: Int[Array, "B J"]) -> "DecodingStates":
        """Sequence j of a row goes on from ``parents[:, j]``: for beam search and contrastive search."""
        ...

    def rewind(self, lengths: Int[Array, " B"]) -> "DecodingStates":
        """As after the first ``lengths`` tokens of each row: for speculative decoding."""
        ...

    def pad_left(self, padding: Int[Array, " B"]) -> "DecodingStates":
        """States that have read nothing, and will not read the first tokens of each row, so many.

        For prefixes of unlike lengths.
        """
        ...

    @property
    def source_valid(self) -> Bool[Array, "B S"] | None:
        """Which places of the source may be read, None without one: for ``Capture`` and ``Coverage``."""
        ...


def select(states: Any, parents: Int[Array, "B J"]) -> Any:
    """``states.select``, or a refusal."""
    reason = "this search goes on from the best of several sequences"
    return _method(states, "select", reason, "num_beams=1 and candidates=1")(parents)


def rewind(states: Any, lengths: Int[Array, " B"]) -> Any:
    """``states.rewind``, or a refusal."""
    reason = "takes back what a draft guessed wrong"
    return _method(states, "rewind", f"speculative decoding {reason}", "no draft")(lengths)


def pad_left(states: Any, padding: Int[Array, " B"]) -> Any:
    """``states.pad_left``, or a refusal."""
    reason = "prefixes of unlike lengths are padded on the left"
    return _method(states, "pad_left", reason, "prefixes of one length")(padding)


def source_valid(states: Any) -> Bool[Array, "B S"]:
    """Which places of the source may be read.

    Raises:
      ValueError: the model reads no source, or its states do not say.
    """
    valid = getattr(states, "source_valid", None)
    if valid is None:
        raise ValueError(
            "this model reads no source, so it has no cross-attention to capture or to cover; "
            "leave capture and coverage out."
        )
    return valid


def _method(states: Any, name: str, reason: str, instead: str) -> Callable:
    method = getattr(states, name, None)
    if method is None:
        raise ValueError(
            f"{reason}, but {type(states).__name__} has no {name}(); decode with {instead}."
        )
    return method
