"""Attention watched while training: numbers of every head on one validation batch, and their picture.

The loss of the task runs as always, in a copy of the model that hands out ``attention_stats``. Matrices of
weights are never made, so that long rows cost no more memory than the loss does.
"""

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from crossattn.analysis import heads
from crossattn.interventions import captured, sites
from crossattn.train.processes import is_main
from crossattn.train.sharding import everywhere, mesh_of, spread_batch

Numbers = dict[str, dict[str, np.ndarray]]
"""For each attention, a number of each head [L N] by its name in ``analysis.heads.of_heads``."""


def of_heads(task: Any, params: Any) -> Numbers:
    """Returns the numbers of all heads that the task's loss reaches, on the middle batch of validation."""
    mesh = mesh_of(params)
    batches = task.numbered_batches("validation", mesh)
    batch = batches[len(batches) // 2].batch
    return jax.device_get(_program(task, mesh)(params, spread_batch(batch, mesh)))


@functools.lru_cache(maxsize=4)
def _program(task: Any, mesh: Any) -> Any:
    watched = copy.copy(task)

    def run(params: Any, batch: Any) -> Any:
        model = task.bind(params)
        names = [name for name in sites(model) if name.endswith(".stats")]

        def loss(tapped: Any) -> None:
            watched.bind = lambda params: tapped
            watched.loss(params, batch, None)

        _, found = captured(loss, model, names)
        return {
            site: heads.of_heads(
                x,
                _real(task, batch, x.mass, site.startswith("encoder.") or site.endswith(".cross")),
                _real(task, batch, x.lse, site.startswith("encoder.")),
            )
            for name, x in found.items()
            for site in [name.removesuffix(".stats")]
        }

    return jax.jit(run, out_shardings=everywhere(mesh))


def _real(task: Any, batch: Mapping[str, Any], numbers: Any, outside: bool) -> Any:
    """Returns what is no padding [B length] of numbers [L B N length]; None where the batch does not tell.

    Encoders, and the keys of cross-attention, are the task's ``memory``: they are ``outside``.
    """
    own = {name: x for name, x in batch.items() if name.endswith("_segment_ids")}
    read = {name: x for name, x in own.items() if name.removesuffix("_segment_ids") in task.memory}
    others = {name: x for name, x in own.items() if name not in read}
    shape = *numbers.shape[1:-2], numbers.shape[-1]
    fitting = [x for x in (read if outside and read else others).values() if x.shape == shape]
    return fitting[0] > 0 if len(fitting) == 1 else None


def draw(found: Numbers, step: int, folder: Any) -> None:
    """Draws the numbers into STEP.png, by the main process; nothing without a local folder or matplotlib."""
    if not found or not isinstance(folder, Path) or not is_main():
        return
    try:
        from crossattn import viz

        picture = viz.statistics(found, f"step {step}")
    except ImportError:
        return
    viz.save(picture, folder / f"{step}.png")
