"""What several processes of one run say to each other; with one process, everything is local.

The one thing to know: except `is_main`, every function here must be called by all processes.
"""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from crossattn.train import cluster


def is_main() -> bool:
    """Whether this is the one process that writes logs and files."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """The JSON-able value that each process gave, in the order of the processes."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size]).decode()) for row, size in zip(rows, sizes, strict=True)]


def stop_after(step: int, asked: str | None, every: int) -> bool:
    """Whether all processes stop after this step, since one of them was asked to; called after each.

    asked: what asked this process, if anything did. Processes that have joined by `cluster` know of it at
    once; others ask each other, which costs a message, after one step in ``every``.
    """
    if jax.process_count() == 1:
        return asked is not None
    if (watch := cluster.current()) is not None:
        return watch.stop_after(step, asked)
    return step % every == 0 and any(gather(asked is not None))


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
