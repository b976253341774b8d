"""Results of ``transformers`` in one small file, for machines that have no PyTorch.

The file has for each case its ``config.json``, names and shapes of tensors, the seed from which ``weights``
makes them, the tables that are not made so, and the measurements.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.parity import reference
from experiments.parity.cases import Case
from experiments.parity.weights import lively

_FROZEN = "tensor "


def make(cases: tuple[Case, ...], path: Path, folder: Path) -> None:
    """Measures all cases with ``transformers`` and writes the file; checkpoints go to the folder."""
    entries = {}
    for index, case in enumerate(cases):
        own = folder / str(index)
        measured = reference.measure(case, reference.build(case, own), own)
        small = {n: measured[n].astype(np.uint8) for n in ("greedy", "beams") if n in measured}
        found = measured | small | _checkpoint(case, own)
        entries |= {f"{case.name}/{name}": array for name, array in found.items()}
    np.savez_compressed(path, **entries)


def read(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Reads case -> entry -> array."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path, allow_pickle=False) as file:
        for key in file.files:
            case, _, name = key.partition("/")
            cases.setdefault(case, {})[name] = file[key]
    return cases


def rebuild(entries: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """Writes the case's checkpoint into the folder; returns its measurements."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(str(entries["config"]), encoding="utf-8")
    tensors = {
        name: entries.get(_FROZEN + name, lively(name, tuple(shape), int(entries["seed"])))
        for name, shape in json.loads(str(entries["shapes"])).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = ("config", "shapes", "seed", _FROZEN)
    return {name: array for name, array in entries.items() if not name.startswith(described)}


def _checkpoint(case: Case, folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    frozen = {
        _FROZEN + name: tensor
        for name, tensor in tensors.items()
        if not np.array_equal(tensor, lively(name, tensor.shape, case.search))
    }
    config = (folder / "config.json").read_text(encoding="utf-8")
    described = {"config": config, "shapes": json.dumps(shapes), "seed": case.search}
    return {name: np.array(value) for name, value in described.items()} | frozen
