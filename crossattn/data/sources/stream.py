"""The beginning of a stream of shards, which is what can be opened of it; see `crossattn.data.stream`."""

from collections.abc import Sequence
from typing import Any

from crossattn.data.sources import Example, Option
from crossattn.data.stream import Stream

FORM = "stream:PATTERN"
SPLITS = ()
OPTIONS = {
    "source_column": Option(str, "The key of the source."),
    "target_column": Option(str, "The key of the target."),
    "at_end": Option(str, "Begin again after the last shard, or wait.", choices=("repeat", "wait")),
    "lanes": Option(
        int, "Parts that processes share; they divide the rows of a batch.", "[1, inf)"
    ),
}


def open_split(
    pattern: str, split: str, *, data_dir: Any = None, **options: Any
) -> Sequence[Example]:
    """The first examples of a split that there are now."""
    return Stream.named(pattern, **options).head(split)


def identify(pattern: str, split: str, *, reverse: bool = False, **options: Any) -> dict[str, Any]:
    """What the stream begins with."""
    return Stream.named(pattern, reverse=reverse, **options).identity()
