"""The seal of a checkpoint: the sizes and checksums of its files, by which a damaged one is known."""

import json
import zlib
from typing import Any

from crossattn.train import storage
from crossattn.train.storage import Folder

FILE = "_FILES.json"


def write_seal(folder: Folder) -> None:
    """Writes the size and CRC of every file of a checkpoint into a file next to them.

    Orbax adds times to its metadata when it commits; the record in it has a checksum of its own.
    """
    files = _fingerprints(folder)
    files.pop("_CHECKPOINT_METADATA", None)
    storage.write_whole(folder / FILE, json.dumps({"files": files, "checksum": crc_of(files)}))


def check_seal(folder: Folder) -> None:
    """Compares the files of a checkpoint with its seal.

    Raises:
        ValueError: a file is missing or differs from the sealed one.
    """
    try:
        sealed = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if sealed["checksum"] != crc_of(sealed["files"]):
            raise ValueError("its own checksum is wrong")
        found = _fingerprints(folder)
        wrong = [name for name, file in sealed["files"].items() if not _same(found.get(name), file)]
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        wrong = [FILE]
    if wrong:
        raise ValueError(f"the file {wrong[0]} is missing or damaged")


def crc_of(value: Any) -> int:
    """Computes the CRC-32 of a JSON-able value in a canonical layout."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _same(found: list[int | None] | None, sealed: list[int | None]) -> bool:
    """Compares sizes and, if both are known, CRCs."""
    if found is None or None not in (found[1], sealed[1]):
        return found == sealed
    return found[0] == sealed[0]


def _fingerprints(folder: Folder) -> dict[str, list[int | None]]:
    """Returns [size, CRC-32] of every file but the seal; a store checks bits itself, and has no CRC."""
    remote = storage.in_store(folder)
    return {
        name: [size, None if remote else _crc_in(folder / name)]
        for name, size in sorted(storage.sizes(folder).items())
        if not name.startswith(FILE)
    }


def _crc_in(path: Folder) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc
