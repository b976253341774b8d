"""Rows of several examples: what stands together, and which examples a row tells before its last one."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from crossattn.data.sources import Example, MappedSource, items_of

_CHUNK = 1024  # examples that are in memory together while their values are read
_DRAWS = 8  # of which one is of another family, for each example before the last


class Rows:
    """Examples with their group, a value that those of a row have in common, and their family.

    The examples before the last of a row are each of a family of its own; without a "family", each example
    is one.

    Attributes:
      examples: of a split.
      together: name of the value; None lets any examples stand together.
      group, family: [examples], numbers.
    """

    def __init__(self, examples: Sequence[Example], together: str | None = None):
        self.examples = examples
        groups, families = [], []
        for first in range(0, len(examples), _CHUNK):
            numbers = range(len(examples))[first : first + _CHUNK]
            for number, each in zip(numbers, items_of(examples, numbers), strict=True):
                groups.append("" if together is None else str(each[together]))
                families.append(str(each.get("family", number)))
        self.group = np.unique(groups, return_inverse=True)[1]
        self.family = np.unique(families, return_inverse=True)[1]
        self._members = [
            np.flatnonzero(self.group == group) for group in range(max(self.group) + 1)
        ]

    def groups(self) -> list[Sequence[Example]]:
        """Returns the examples of each group, by the order of the shared values."""
        return [MappedSource(own.tolist(), self.examples.__getitem__) for own in self._members]

    def before(self, last: int, count: int, seed: int = 0) -> Int[np.ndarray, " count"]:
        """Draws examples of the group of ``last``, of families of their own; fewer where there are no more.

        With a smaller ``count`` come the first of the same ones.
        """
        own, random = self._members[self.group[last]], np.random.default_rng([seed, last])
        drawn = np.append(last, own[random.integers(len(own), size=_DRAWS * count)])
        _, first = np.unique(self.family[drawn], return_index=True)
        return drawn[np.sort(first)][1 : 1 + count]

    def ending(self, count: int, seed: int) -> Sequence[Example]:
        """Returns as many rows as there are examples: each after ``count`` others."""
        numbers = range(len(self.examples))
        return MappedSource(numbers, lambda last: self.row([*self.before(last, count, seed), last]))

    def once(self, count: int) -> Sequence[Example]:
        """Returns rows of at most ``count`` that hold every example once, in one random order."""
        order = np.random.default_rng(0).permutation(len(self.examples))
        rows = []
        for group in range(len(self._members)):
            own = order[self.group[order] == group]
            rows += [own[first : first + count] for first in range(0, len(own), count)]
        return MappedSource(rows, self.row)

    def row(self, numbers: Sequence[int]) -> Example:
        """Returns the images and captions of examples as one example."""
        read = items_of(self.examples, [int(number) for number in numbers])
        return {
            "id": read[-1].get("id"),
            "images": [each["image"] for each in read],
            "target": [each["caption"] for each in read],
        }
