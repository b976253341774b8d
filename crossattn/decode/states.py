"""The decoding protocol: the methods that searches call on a model and on its states.

A model that generates has

    states = model.prefill(batch, num_beams, cache_length, **inputs)
    logits, states = model.decode_step(tokens, states)

``prefill`` reads the inputs once, for ``num_beams`` sequences a row. ``decode_step`` reads the next T tokens
[B J T] and returns the logits [B J T V] of the tokens after them, and states of the same structure. A model
of frames [B J T F] decodes likewise, in a loop of its own.
"""

from collections.abc import Callable
from typing import Any, Protocol

from crossattn.types import Array, Bool, Int

DecodeStep = Callable[..., tuple]
"""``(tokens [B J T], states) -> (logits [B J T V], states)``.

With ``return_weights=True``, for ``Capture``, it returns weights [L B J N T S] of cross-attention as well.
"""


class DecodingStates(Protocol):
    """State of a model between steps, a pytree of arrays.

    Greedy decoding and sampling need none of these methods; a search refuses states that lack its own.
    """

    def select(self, parents: Int[Array, "B J"]) -> "DecodingStates":
        """Sequence j of a row continues ``parents[:, j]``: for beam search and contrastive search."""
        ...

    def rewind(self, lengths: Int[Array, " B"]) -> "DecodingStates":
        """Returns the states after the first ``lengths`` tokens of each row: for speculative decoding."""
        ...

    def pad_left(self, padding: Int[Array, " B"]) -> "DecodingStates":
        """Masks the first ``padding`` tokens of each row, of which none is read: for unlike prefixes."""
        ...

    @property
    def source_valid(self) -> Bool[Array, "B S"] | None:
        """Padding mask of the source, None without one: for ``Capture`` and ``Coverage``."""
        ...


_NEEDS = {
    "select": (
        "this search continues the best of several sequences",
        "num_beams=1 and candidates=1",
    ),
    "rewind": ("speculative decoding takes back guesses that are wrong", "no draft"),
    "pad_left": ("prefixes of unlike lengths are padded on the left", "prefixes of one length"),
}


def method(states: Any, name: str) -> Callable[[Array], Any]:
    """Returns ``states.select``, ``states.rewind`` or ``states.pad_left``.

    Raises:
      ValueError: the states lack the method.
    """
    found = getattr(states, name, None)
    if found is None:
        reason, instead = _NEEDS[name]
        raise ValueError(
            f"{reason}, but {type(states).__name__} has no {name}(); decode with {instead}."
        )
    return found


def source_valid(states: Any) -> Bool[Array, "B S"]:
    """Returns the padding mask of the source.

    Raises:
      ValueError: the model reads no source, or its states have no mask.
    """
    valid = getattr(states, "source_valid", None)
    if valid is None:
        raise ValueError(
            "this model reads no source, so it has no cross-attention to capture or to cover; "
            "leave capture and coverage out."
        )
    return valid
