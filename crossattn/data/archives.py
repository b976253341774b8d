"""Debian packages, npm packages and zip files, read without trust in the sizes that they state.

The content of a file is held to one limit, `LARGEST` or 200 times the size of the file. Nothing is unpacked
to disk, so nothing leaves a folder, and links are left out. A Debian package is an `ar` archive, for which
Python has no reader, and python-debian's never ends on a negative size.
"""

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from crossattn.data.errors import absent

LARGEST = 2**30
"""The most bytes that an archive, or a member of a zip file, may unpack to."""
IN_MEMORY = 2**28
"""The most bytes of a member of a zip file that is held in memory."""

# Text packs 15 times, sound and weights hardly; zeros a thousand times.
_RATIO, _ALWAYS = 200, 2**26
_CHUNK = 2**18
_OPENERS: dict[str, Callable[[Any], Any]] = {"gz": gzip.open, "xz": lzma.open, "bz2": bz2.open}
# The standard library reads no zstd before Python 3.14; machines whose packages use it have dpkg-deb.
_BY_DPKG = {"data": "--fsys-tarfile", "control": "--ctrl-tarfile"}
# A damaged file makes the readers raise almost anything.
_UNREADABLE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
    struct.error,
    gzip.BadGzipFile,
    ArithmeticError,
    EOFError,
    RuntimeError,
    ValueError,
)


class Damaged(ValueError):
    """An archive that is not whole, of another kind, or unpacks to too much; the message says which."""


@contextlib.contextmanager
def _read(path: Path, pattern: str) -> Iterator[None]:
    """Names the file, its folder and the pattern of its name where it cannot be read."""
    try:
        yield
    except (OSError, Damaged, *_UNREADABLE) as error:
        reason = f"{path.name} cannot be read ({str(error) or type(error).__name__})"
        raise absent([pattern], path.parent, reason) from error


def read_deb(path: Path, prefix: str, suffix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yields (path below `prefix`, content) of files of a Debian package, held to its list of MD5 sums.

    Raises:
      DataUnavailable: the file is no whole Debian package, or unpacks to more than is read.
    """
    wanted = _chosen(prefix, suffix)
    with _read(path, path.name.split("_")[0] + "_*.deb"):
        sums, seen = {}, set()
        for _, listed in _deb_part(path, "control", "md5sums".__eq__):
            lines = (listed or b"").decode("utf-8", "surrogateescape").splitlines()
            sums = {line[34:]: line[:32] for line in lines}
        for name, content in _deb_part(path, "data", wanted):
            seen.add(name)
            if content is None:
                continue
            if name not in sums:
                raise Damaged(f"it has no checksum of {name}")
            if hashlib.md5(content, usedforsecurity=False).hexdigest() != sums[name]:
                raise Damaged(f"{name} in it is not as its md5sums says")
            yield name.removeprefix(prefix), content
        if missing := {name for name in sums if wanted(name)} - seen:
            raise Damaged(f"it lacks {min(missing)}, which its md5sums lists")


def read_tgz(path: Path, prefix: str, suffix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yields (path below `prefix`, content) of files of an npm package or another .tgz archive.

    Raises:
      DataUnavailable: the file is no whole archive, or unpacks to more than is read.
    """
    wanted = _chosen(prefix, suffix)
    with _read(path, path.name), gzip.open(path) as stream:
        for name, content in _tar_files(stream, _unpacked_limit(path.stat().st_size), wanted):
            if content is not None:
                yield name.removeprefix(prefix), content


def read_zip(path: Path, names: list[str]) -> list[bytes]:
    """Returns the contents of the named members of a zip file or wheel.

    Raises:
      DataUnavailable: as `zip_pieces`, or a member is larger than is held in memory.
    """
    return [b"".join(zip_pieces(path, name, IN_MEMORY)) for name in names]


def zip_pieces(path: Path, name: str, limit: int = LARGEST) -> Iterator[bytes]:
    """Yields the content of a member of a zip file or wheel, piece by piece; its checksum is compared last.

    Raises:
      DataUnavailable: the file is no zip file, lacks the member, holds it encrypted, compressed in an unusual
        way, damaged, or larger than the limit.
    """
    with _read(path, path.name), zipfile.ZipFile(path) as archive:
        if name not in archive.namelist():
            raise Damaged(f"it lacks {name}")
        info = archive.getinfo(name)
        if info.flag_bits & 0x61:
            raise Damaged(f"{name} in it is encrypted or a patch; expected it plain")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            kind = zipfile.compressor_names.get(info.compress_type, info.compress_type)
            raise Damaged(f"{name} in it is compressed by {kind}; expected deflate, or nothing")
        _hold(info.file_size, min(limit, _unpacked_limit(info.compress_size)), name)
        with archive.open(info) as member:
            while piece := member.read(_CHUNK):
                yield piece


def gunzip(raw: bytes, limit: int = IN_MEMORY) -> bytes:
    """Returns the content of a file that gzip has compressed, its checksum compared.

    Raises:
      Damaged: it is damaged, or holds more than the limit.
    """
    try:
        with gzip.open(io.BytesIO(raw)) as stream:
            content = stream.read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Damaged(f"its compressed data are damaged: {error}") from None
    _hold(len(content), limit)
    return content


def _chosen(prefix: str, suffix: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix) and name.endswith(suffix)


def _deb_part(
    path: Path, part: str, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes | None]]:
    """Yields `_tar_files` of the member "control" or "data" of a package (see `man 5 deb`)."""
    kind, packed = _deb_member(path, part)
    limit = _unpacked_limit(len(packed))
    if kind == "zst":
        yield from _by_dpkg(path, _BY_DPKG[part], limit, wanted)
    elif kind in _OPENERS:
        with _OPENERS[kind](io.BytesIO(packed)) as stream:
            yield from _tar_files(stream, limit, wanted)
    else:
        raise Damaged(f"its {part} is compressed in the unknown way {kind!r}")


def _deb_member(path: Path, part: str) -> tuple[str, bytes]:
    """Returns the compression and the bytes of a part of a package."""
    with path.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise Damaged("it does not begin like one")
        while len(head := file.read(60)) == 60:
            name, size = head[:16].decode("ascii").strip().rstrip("/"), head[48:58].strip()
            if head[58:] != b"`\n" or not size.isdigit():
                raise Damaged("the header of a member is damaged")
            if name.startswith(f"{part}.tar."):
                packed = file.read(min(int(size), path.stat().st_size))
                return name.removeprefix(f"{part}.tar."), packed
            file.seek(int(size) + int(size) % 2, io.SEEK_CUR)
    raise Damaged(f"it has no member {part}.tar")


def _by_dpkg(
    path: Path, option: str, limit: int, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes | None]]:
    try:
        process = subprocess.Popen(
            ["dpkg-deb", option, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        raise Damaged("it is compressed by zstd, and there is no dpkg-deb to read it") from None
    with process:
        try:
            yield from _tar_files(process.stdout, limit, wanted)
        finally:
            process.kill()


def _tar_files(
    stream: Any, limit: int, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, bytes | None]]:
    """Yields (name, content) of the wanted members of a tar archive; content is None where it is no file.

    The stream is read to its end, where compression has its checksum.
    """
    stream = _Limited(stream, limit)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if wanted(name := member.name.removeprefix("./")):
                yield name, archive.extractfile(member).read() if member.isreg() else None
    while stream.read(_CHUNK):
        pass


class _Limited:
    """A file from which a limited number of bytes is read."""

    def __init__(self, file: Any, limit: int):
        self._file, self._limit, self._size = file, limit, 0

    def read(self, size: int) -> bytes:
        piece = self._file.read(min(size, _CHUNK))
        self._size += len(piece)
        _hold(self._size, self._limit)
        return piece


def _hold(size: int, limit: int, what: str = "it") -> None:
    if size > limit:
        raise Damaged(
            f"{what} unpacks to more than {limit / 2**20:.0f} MiB, at which reading stops"
        )


def _unpacked_limit(packed: int) -> int:
    return min(LARGEST, max(_ALWAYS, _RATIO * packed))
