"""Gains of retrieved passages by their overlap with the text that follows, of ever more chunks.

Source: Borgeaud et al. 2021, section 2.6.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import intervals, launch
from experiments.intervals import Interval

KEPT = tuple(n / 8 for n in range(1, 9))
"""The greatest overlaps of the chunks that are kept, see ``neighbours.overlap``."""

Gains = Mapping[str, Sequence[Interval]]
"""Nats a token that a run has less than another, or than itself with other passages, by ``KEPT``."""


def gains(results: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, int], Gains]:
    """Returns the tokens that are kept by the greatest overlap, and the gains; files are drawn together.

    Each run is held to itself without passages and with random ones, and to the first run.

    Raises:
      Refused: a run has no losses of chunks, or those of others than the first.
    """
    tables: dict[str, Any] = {name: own.get("chunks") for name, own in results.items()}
    (first, known), *_ = tables.items()
    pairs = {}
    for name, own in tables.items():
        if not own or any(own[key] != known[key] for key in ("overlap", "weight", "group")):
            raise launch.Refused(
                f"{name} has no losses of chunks, or of others than {first}; evaluate both on the same split."
            )
        others = {"no passages": own.get("nll_without"), "random passages": own.get("nll_random")}
        others |= {first: known["nll"]} if name != first else {}
        pairs |= {f"{name} over {x}": [own["nll"], nll] for x, nll in others.items() if nll}
    weight, overlap, group = (np.array(known[key]) for key in ("weight", "overlap", "group"))
    kept = {f"{bound:.3g}": overlap <= bound for bound in KEPT if (overlap <= bound).any()}
    lines = {
        name: [
            intervals.difference(nll[x], other[x], weight[x], group[x].tolist())
            for x in kept.values()
        ]
        for name, (nll, other) in zip(pairs, np.array(list(pairs.values())), strict=True)
    }
    return {bound: int(weight[x].sum()) for bound, x in kept.items()}, lines


def table(kept: Mapping[str, int], lines: Gains) -> list[tuple[str, ...]]:
    """Returns rows of the gains, one a greatest overlap."""
    columns = zip(*lines.values(), strict=True)
    body = [(x, str(kept[x]), *map(str, own)) for x, own in zip(kept, columns, strict=True)]
    return [("overlap at most", "tokens", *lines), *body]


def draw(kept: Mapping[str, int], lines: Gains) -> Any:
    """Draws the gains by the greatest overlap, with bars of their intervals."""
    return intervals.draw(list(kept), lines, "greatest overlap, of a chunk", "gain, nats a token")
