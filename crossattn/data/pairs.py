"""Features of pairs of texts: a source that is read, a target that is predicted, alignments of words."""

from collections.abc import Mapping, Sequence
from typing import Any

from crossattn.data.errors import DataError
from crossattn.data.features.links import Links
from crossattn.data.features.text import Text
from crossattn.data.sources import MappedSource
from crossattn.data.tokenizers import Tokenizer

ANY_LENGTH = 2**31 - 2
"""The greatest length of a text that is never cut."""


def pair_features(
    tokenizer: Tokenizer,
    target_tokenizer: Tokenizer | None = None,
    *,
    source_len: int = 128,
    target_len: int = 128,
    side: str = "both",
    links: bool = False,
) -> Mapping[str, Any]:
    """Returns the features of examples as `pair_examples` gives them.

    Args:
        tokenizer: of both sides, or of the source when `target_tokenizer` is given.
        source_len, target_len: tokens; the longest that a source and a target may be, EOS included.
        side: "both"; or "source" or "target" for that text alone, as the target.
        links: whether alignments of words are kept.

    Raises:
        DataError: an option is out of range.
    """
    if side not in ("both", "source", "target"):
        raise DataError(f"side is {side!r}; expected 'both', 'source' or 'target'")
    if links and side != "both":
        raise DataError(f"links join a source and a target; side is {side!r}")
    if target_len < 2 or (side == "both" and source_len < 2):
        raise DataError(f"lengths are {source_len} and {target_len}; expected at least 2")
    target = Text(target_tokenizer or tokenizer, target_len, predicted=True)
    if side != "both":
        return {"target": target}
    source = Text(tokenizer, source_len)
    both = {"source": source, "target": target}
    return both | {"links": Links(source, target)} if links else both


def pair_examples(
    source: Sequence[Mapping[str, Any]], side: str = "both", links: bool = False
) -> Sequence[Mapping[str, Any]]:
    """Returns the examples of a source of pairs, as `pair_features` reads them."""
    if side == "source":
        return MappedSource(source, lambda each: {"id": each.get("id"), "target": each["source"]})
    return MappedSource(source, lambda each: {**each, "links": each}) if links else source
