"""One checkpoint on disk: what it says about itself, whether it is intact, how it is read.

The one thing to know: everything that can be known to be wrong is found before Orbax is asked to
read arrays, because its readers run in parallel and complain from many places at once.
"""

import base64
import contextlib
import json
import logging
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from crossattn.train import processes, storage
from crossattn.train.checksum import checksum
from crossattn.train.storage import Folder

UNSEALED = ".unsealed"  # at the end of what marks a step that is not whole
_SEAL = "_FILES.json"


def context(directory: Folder) -> ocp.Context:
    """Orbax's options for checkpoints in a folder."""
    context = ocp.Context()
    if storage.in_store(directory):  # Nothing is renamed there.
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
        # Of runs that were copied there from a disk; whether one is whole, the seal says.
        context.atomicity.allow_legacy_atomic_rename = True
    # Trained float32 hardly compresses, and the cores have better things to do.
    context.array.saving.use_compression = False
    # Else threads wait for minutes, and the process with them, where a folder cannot be made.
    context.async_options.create_directories_asynchronously = False
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


def steps_in(directory: Folder) -> list[int]:
    """The steps whose checkpoints lie in a directory, oldest first, but for those marked as unsealed."""
    names = storage.names(directory)
    marked = {name.removesuffix(UNSEALED) for name in names if name.endswith(UNSEALED)}
    numbers = (name for name in names if name.isascii() and name.isdecimal())
    return sorted(int(name) for name in numbers if name not in marked)


def seal(directory: Folder) -> None:
    """Writes down size and CRC of every file of a finished checkpoint, beside them."""
    files = _fingerprints(directory)
    text = json.dumps({"files": files, "checksum": _json_checksum(files)})
    storage.write_whole(directory / _SEAL, text)


def check_intact(directory: Folder) -> tuple[dict[str, Any], bool]:
    """The record of a checkpoint whose files are as they were sealed, and whether it has a seal.

    Those of earlier versions of this library may lack one, and only their arrays have checksums.

    Raises:
        ValueError: a file is missing or not as it was sealed.
    """
    sums: dict[str, Any] = {}
    if processes.is_main():
        try:
            sealed = _check_files(directory)
            record = read_record(directory)
            # What this version writes has its seal before it has its name.
            if not sealed and "checksum" in record:
                raise ValueError(f"the file {_SEAL} is missing")
            sums = {"record": record, "sealed": sealed}
        except Exception as error:
            sums = {"wrong": one_line(error)}
    sums = processes.gather(sums)[0]
    if "wrong" in sums:
        raise ValueError(sums["wrong"])
    return sums["record"], sums["sealed"]


def _check_files(directory: Folder) -> bool:
    """Whether there is a seal; raises ValueError when a file is not as it says."""
    try:
        sealed = json.loads((directory / _SEAL).read_text(encoding="utf-8"))
        # Earlier versions wrote the files alone.
        files = sealed["files"] if "checksum" in sealed else sealed
        if files is not sealed and sealed["checksum"] != _json_checksum(files):
            raise ValueError("its own checksum is wrong")
        sums = _fingerprints(directory)
        wrong = [name for name in files if not _is_same(sums.get(name), files[name])]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError):
        wrong = [_SEAL]
    if wrong:
        raise ValueError(f"the file {wrong[0]} is missing or damaged")
    return True


def _json_checksum(value: Any) -> int:
    """CRC-32 of a JSON-able value, however it is laid out as text."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _fingerprints(directory: Folder) -> dict[str, list[int | None]]:
    """The size and CRC-32 of every file but the seal, by its name.

    Of objects the CRC is None: a store checks them itself, arrays have checksums of their own, and all
    would have to be fetched again.
    """
    sums: dict[str, list[int | None]] = {}
    remote = storage.in_store(directory)
    for name, size in sorted(storage.sizes(directory).items()):
        if not name.startswith(_SEAL):
            sums[name] = [size, None if remote else _crc(directory / name)]
    return sums


def _crc(path: Folder) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def _is_same(present: Any, sealed: Any) -> bool:
    """Whether a file has the size and, where both are known, the CRC that it was sealed with."""
    if present is None or None not in (present[1], sealed[1]):
        return present == sealed
    return present[0] == sealed[0]


def sealed_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON-able record with its checksum."""
    return {**record, "checksum": _json_checksum(record)}


def read_record(directory: Folder) -> dict[str, Any]:
    """The JSON that was saved with the checkpoint in a directory.

    Raises:
        ValueError: it is not there, damaged, or of another step.
    """
    try:
        with context(directory):
            record = ocp.checkpointables_metadata(str(directory)).custom_metadata
    except Exception as error:  # Orbax raises whatever its readers come upon.
        raise ValueError(f"its metadata is missing or damaged ({one_line(error)})") from error
    if not isinstance(record, dict) or str(record.get("step")) != directory.name:
        raise ValueError("its metadata is missing or damaged")
    rest = {key: value for key, value in record.items() if key != "checksum"}
    if "checksum" in record and record["checksum"] != _json_checksum(rest):
        raise ValueError("its metadata is damaged: the checksum does not match")
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
    directory: Folder, targets: Mapping[str, Any], record: Mapping[str, Any]
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
    with context(directory):
        loaded = ocp.load_checkpointables(str(directory), targets)
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


def one_line(error: BaseException) -> str:
    """The error as one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
