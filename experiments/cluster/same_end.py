"""Compares the ends of two runs, bit for bit.

    python -m experiments.cluster.same_end runs/whole runs/killed

The arrays of their last checkpoints (parameters, averages, the optimiser's state) and all losses have to be
the same. Exit code 1 when something differs.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from crossattn.train.checkpoint import quiet_orbax, steps_in
from experiments import launch
from experiments.options import Options


def main() -> int:
    """Runs the command."""
    parser = Options(__doc__)
    parser.add_argument("runs", nargs=2, metavar="WORKDIR", help="a finished run")
    runs = parser.parse_args().runs
    for run in runs:
        if not steps_in(Path(run) / "checkpoints"):
            parser.error(f"there are no checkpoints in {run}: train first")
    return compare(*runs)


def compare(one: str, other: str) -> int:
    """Prints whether the runs are the same, or the first difference."""
    steps = [steps_in(Path(run) / "checkpoints")[-1] for run in (one, other)]
    if steps[0] != steps[1]:
        print(f"different: {one} ended with step {steps[0]}, {other} with step {steps[1]}")
        return 1
    arrays = [_arrays(Path(run).absolute() / "checkpoints" / str(steps[0])) for run in (one, other)]
    losses = [_losses(Path(run)) for run in (one, other)]
    if arrays[0].keys() != arrays[1].keys():
        print("different: they do not hold the same arrays")
        return 1
    changed = [name for name in arrays[0] if _bits(arrays[0][name]) != _bits(arrays[1][name])]
    if changed:
        print(f"different: {len(changed)} of {len(arrays[0])} arrays, {changed[0]} the first")
        return 1
    if losses[0] != losses[1]:
        print("different: the losses on the way")
        return 1
    size = sum(each.nbytes for each in arrays[0].values())
    print(
        f"the same bits: {len(arrays[0])} arrays of {size:,} bytes at step {steps[0]}, and"
        f" {len(losses[0])} losses"
    )
    return 0


def _arrays(folder: Path) -> dict[str, np.ndarray]:
    """Reads all arrays of a checkpoint by name, whatever mesh it was saved on."""
    arrays = {}
    with quiet_orbax(), ocp.PyTreeCheckpointer() as reader:
        for tree in sorted(path for path in folder.iterdir() if (path / "_METADATA").exists()):
            shapes = reader.metadata(tree).item_metadata.tree
            to_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
            values: Any = reader.restore(tree, restore_args=to_numpy)
            for path, value in jax.tree_util.tree_leaves_with_path(values):
                arrays[tree.name + jax.tree_util.keystr(path)] = np.asarray(value)
    return arrays


def _bits(x: np.ndarray) -> tuple:
    return x.dtype, x.shape, x.tobytes()


def _losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


if __name__ == "__main__":
    launch.script(main)
