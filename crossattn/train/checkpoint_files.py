"""One checkpoint on disk: what it says about itself, whether it is intact, how it is read.

The one thing to know: everything that can be known to be wrong is found before Orbax is asked to
read arrays, because its readers run in parallel and complain from many places at once.
"""

import base64
import contextlib
import json
import logging
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from crossattn.train import processes
from crossattn.train.checksum import checksum

_SEAL = "_FILES.json"
_FULL_DISK = ("no space left", "file too large", "quota exceeded", "resource_exhausted")


def context() -> ocp.Context:
    """Orbax's options."""
    context = ocp.Context()
    # Trained float32 hardly compresses, and the cores have better things to do.
    context.array.saving.use_compression = False
    return context


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Orbax also logs, with its stack, what it raises; here it is raised again in one line."""

    def other(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def seal(directory: Path) -> None:
    """Writes down size and CRC of every file of a finished checkpoint, beside them."""
    if not directory.is_dir() or (directory / _SEAL).exists():
        return
    unfinished = directory / (_SEAL + ".tmp")
    unfinished.write_text(json.dumps(_fingerprints(directory)), encoding="utf-8")
    os.replace(unfinished, directory / _SEAL)


def check_intact(directory: Path) -> None:
    """Raises ValueError when a file is not as it was sealed. Without a seal (the run was killed
    between writing and sealing) nothing is known, and the arrays' own checksums must do."""
    wrong = None
    if processes.is_main() and (directory / _SEAL).exists():
        try:
            sealed = json.loads((directory / _SEAL).read_text(encoding="utf-8"))
            found = _fingerprints(directory)
            wrong = next((name for name in sealed if found.get(name) != sealed[name]), None)
        except (OSError, ValueError, TypeError):
            wrong = _SEAL
    wrong = processes.gather(wrong)[0]
    if wrong is not None:
        raise ValueError(f"the file {wrong} is missing or damaged")


def _fingerprints(directory: Path) -> dict[str, list[int]]:
    """name -> [size, CRC-32], of every file but the seal."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.name.startswith(_SEAL):
            crc, size = 0, 0
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    crc, size = zlib.crc32(chunk, crc), size + len(chunk)
            found[str(path.relative_to(directory))] = [size, crc]
    return found


def read_record(orbax: Any, step: int) -> dict[str, Any]:
    """The JSON that was saved with a step."""
    record = orbax.checkpointables_metadata(step).custom_metadata
    if not record or record.get("step") != step:
        raise ValueError("its metadata is missing or damaged")
    return record


def describe(trees: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Of each tree: name of each array -> dtype and shape."""
    return {
        name: {
            jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}"
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        for name, tree in trees.items()
    }


def read_trees(
    orbax: Any, step: int, targets: Mapping[str, Any], record: Mapping[str, Any]
) -> dict[str, Any]:
    """The trees named in targets, in the targets' structure and places.

    Raises:
        ValueError: what was saved is of another model, or is not what comes back.
    """
    targets = {name: jax.tree.map(abstract, tree) for name, tree in targets.items()}
    for name, wanted in describe(targets).items():
        saved = record["arrays"].get(name, {})
        for key in sorted(wanted.keys() | saved.keys()):
            if wanted.get(key) != saved.get(key):
                raise ValueError(
                    f"{name} {key} is {saved.get(key, 'missing')} in the checkpoint and"
                    f" {wanted.get(key, 'missing')} in the model"
                )
    loaded = orbax.load_checkpointables(step, targets)
    for name in targets:
        if checksum(loaded[name]) != record["checksums"][name]:
            raise ValueError(f"the checksum of {name} does not match what was saved")
    return {name: loaded[name] for name in targets}


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of an array; the first local device where it has no place."""
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def to_json(state: Any) -> dict[str, Any]:
    """A data iterator's state, JSON-able or bytes, as JSON."""
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    return {"json": json.loads(json.dumps(state, default=lambda x: x.item()))}


def from_json(saved: Mapping[str, Any]) -> Any:
    """What `to_json` was given."""
    return base64.b64decode(saved["bytes"]) if "bytes" in saved else saved["json"]


def goodness(metrics: Mapping[str, float] | None, name: str | None, mode: str) -> float:
    """Higher is better; a metric that is missing or NaN is worst."""
    value = float((metrics or {}).get(name or "", math.nan))
    if math.isnan(value):
        return -math.inf
    return value if mode == "max" else -value


def is_full_disk(error: BaseException | None) -> bool:
    """Whether somewhere behind this error the disk, a quota or a size limit was exhausted."""
    while error is not None:
        if any(word in str(error).lower() for word in _FULL_DISK):
            return True
        error = error.__cause__ or error.__context__
    return False


def one_line(error: BaseException) -> str:
    """The error as one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
