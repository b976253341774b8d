"""Debian packages, npm packages and zip files, read without believing what they say of themselves.

Whoever made a file chose its sizes: each is held to the file, and what comes out of it to a limit. Nothing is
given away before the checksums of what it came from hold; nothing is unpacked to disk. The outer file of a
Debian package is taken apart here, because Python has no reader of `ar` and dpkg-deb is not everywhere.
"""

import bz2
import gzip
import hashlib
import io
import lzma
import re
import struct
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 2**30
"""Bytes that an archive, or a member of a zip file, may unpack to."""
IN_MEMORY = 2**28
"""Bytes of a member of a zip file that is wanted whole."""

# Text packs 15 times, sound and weights hardly; zeros a thousand times.
_RATIO, _ALWAYS = 200, 2**26
_CHUNK = 2**18
_LONGEST_NAME = 2**16
_XZ_MEMORY = 2**28
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": lambda: zlib.decompressobj(wbits=31),
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
    "bz2": bz2.BZ2Decompressor,
}
# The standard library reads no zstd before Python 3.14; machines whose packages use it have dpkg-deb.
_BY_DPKG = {"data": "--fsys-tarfile", "control": "--ctrl-tarfile"}


class Damaged(ValueError):
    """An archive is not whole, not what it should be, or asks for too much; the message says which."""


def deb_files(path: Path, prefix: str, suffix: str = "") -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files of a Debian package whose names begin and end so.

    Each is as the package's own list of MD5 sums says, and where that has it not, as the checksums of the
    compression say. Links are left out.

    Raises:
      Damaged: the file is no whole Debian package, or unpacks to more than ``LARGEST``.
      OSError: it cannot be read.
    """

    def wanted(name: str) -> bool:
        return name.startswith(prefix) and name.endswith(suffix)

    with path.open("rb") as file:
        parts = _parts(file)
        sums = _md5_sums(path, file, parts["control"])
        held = _Tar(path, file, parts["data"])
        seen = set()
        for name, is_file, content in held.members(wanted):
            seen.add(name)
            if not is_file:
                continue
            if name in sums:
                if hashlib.md5(content, usedforsecurity=False).hexdigest() != sums[name]:
                    raise Damaged(f"{name} in it is not as its md5sums says")
            elif not held.checked:
                raise Damaged(f"it has no checksum of {name}")
            yield name, content
    if missing := {name for name in sums if wanted(name)} - seen:
        raise Damaged(f"it lacks {min(missing)}, which its md5sums lists")


def tgz_files(path: Path, prefix: str, suffix: str = "") -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files of a .tgz archive whose names begin and end so.

    Links are left out. A pinned archive has been held to its checksum before; the limits are for others.

    Raises:
      Damaged: the file is no such archive, not whole, or unpacks to more than ``LARGEST``.
      OSError: it cannot be read.
    """
    limit, size = _unpacked_limit(path.stat().st_size), 0
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                size += member.size
                _hold(size, limit)
                if (
                    member.isreg()
                    and member.name.startswith(prefix)
                    and member.name.endswith(suffix)
                ):
                    yield member.name, archive.extractfile(member).read()
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise Damaged(f"it is no whole archive: {error}") from None


def inflated(
    file: Any, kind: str, limit: int, check: Callable[[Any], None] = lambda stream: None
) -> Iterator[bytes]:
    """What a file holds that is compressed as ``kind`` (gz, xz, bz2), piece by piece, checksums compared.

    Args:
      limit: of the bytes that come out.
      check: is given the decompressor at the end.

    Raises:
      Damaged: it is damaged, holds more, or something stands behind it.
    """
    stream, size = _DECOMPRESSORS[kind](), 0
    try:
        while not stream.eof:
            left = getattr(stream, "unconsumed_tail", b"")
            data = left or (file.read(_CHUNK) if getattr(stream, "needs_input", True) else b"")
            out = stream.decompress(data, _CHUNK)
            if not data and not out and not stream.eof:
                raise Damaged("it is cut short")
            size += len(out)
            _hold(size, limit)
            if out:
                yield out
    except (zlib.error, lzma.LZMAError, OSError, EOFError, MemoryError) as error:
        raise Damaged(f"its compressed data are damaged: {error}") from None
    if stream.unused_data or file.read(1):
        raise Damaged("something stands behind its compressed data")
    check(stream)


def zip_member(path: Path, name: str, limit: int = LARGEST) -> Iterator[bytes]:
    """A member of a zip file, piece by piece; its checksum is compared at the end.

    Raises:
      Damaged: the file is no zip file, lacks the member, holds it encrypted, compressed in an unusual way,
        damaged, or larger than the limit.
      OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
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
    except Damaged:
        raise
    except OSError:
        raise
    except KeyError:
        raise Damaged(f"it lacks {name}") from None
    except _OF_ZIPS as error:
        raise Damaged(str(error) or type(error).__name__) from None


# A damaged directory makes the module raise almost anything.
_OF_ZIPS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ArithmeticError,
    EOFError,
    RuntimeError,
    ValueError,
)


def _hold(size: int, limit: int, what: str = "it") -> None:
    if size > limit:
        raise Damaged(
            f"{what} unpacks to more than {limit / 2**20:.0f} MiB, at which reading stops"
        )


def _unpacked_limit(packed: int) -> int:
    return min(LARGEST, max(_ALWAYS, _RATIO * packed))


@dataclass(frozen=True)
class _Part:
    """A member of the outer archive: its name, where it begins, and its size."""

    name: str
    start: int
    size: int


def _parts(file: Any) -> dict[str, _Part]:
    """The members "control" and "data" of a package, which is an `ar` archive (see `man 5 deb`)."""
    end = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(8) != b"!<arch>\n":
        raise Damaged("it does not begin like one")
    at, members = 8, []
    while at < end:
        file.seek(at)
        head = file.read(60)
        name, size = head[:16].rstrip(b" "), head[48:58].rstrip(b" ")
        if head[58:] != b"`\n" or not name.isascii() or not size.isdigit():
            raise Damaged(f"there is no header of a member at byte {at}")
        part = _Part(name.decode("ascii").rstrip("/"), at + 60, int(size))
        if part.start + part.size > end:
            raise Damaged("it is cut short")
        members.append(part)
        at = part.start + part.size + part.size % 2
    if not members or members[0].name != "debian-binary":
        raise Damaged("its first member is not debian-binary")
    file.seek(members[0].start)
    if file.read(2) != b"2.":
        raise Damaged("it is of another version than 2")
    parts = {}
    for key in ("control", "data"):
        own = [part for part in members if part.name.split(".")[:2] == [key, "tar"]]
        if len(own) != 1:
            raise Damaged(f"it has {len(own)} members {key}.tar; expected one")
        parts[key] = own[0]
    return parts


def _md5_sums(path: Path, file: Any, part: _Part) -> dict[str, str]:
    """File -> checksum, as the package lists them; empty where it does not."""
    sums = {}
    for _, is_file, content in _Tar(path, file, part).members(lambda name: name == "md5sums"):
        for line in content.decode("utf-8", "surrogateescape").splitlines() if is_file else ():
            entry = re.fullmatch(r"([0-9a-f]{32})  (.+)", line)
            if entry is None:
                raise Damaged("its md5sums has a line that is none")
            sums[entry[2]] = entry[1]
    return sums


class _Tar:
    """A tar archive in a package: read once for its checksums, then for its members."""

    def __init__(self, path: Path, file: Any, part: _Part):
        self._path, self._file, self._part = path, file, part
        self.checked = part.name.endswith((".gz", ".bz2"))
        self._size, self._held = 0, []
        for piece in self._pieces():
            self._size += len(piece)
            self._held.append(piece)
            if self._size > _ALWAYS:  # it is read once more instead
                self._held.clear()

    def members(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bool, bytes]]:
        """(name, whether it is a file, content) of those wanted."""
        again = self._size > _ALWAYS
        source, at, longer = _Forward(self._pieces() if again else iter(self._held)), 0, None
        while (head := source.take(512)).strip(b"\0"):
            at += 512
            name, kind, size = _header(head)
            if size > self._size - at:
                raise Damaged("it is cut short")
            at += size + -size % 512
            if kind in (b"L", b"K"):  # a name that is too long for a header: its own, its target's
                if size > _LONGEST_NAME:
                    raise Damaged(f"a name in it has {size} bytes")
                text = source.take(size).rstrip(b"\0").decode("utf-8", "surrogateescape")
                longer = text if kind == b"L" else longer
                source.skip(-size % 512)
                continue
            name, longer = (longer or name).removeprefix("./"), None
            if kind not in (b"0", b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7"):
                raise Damaged(f"{name} in it is of the unknown kind {kind!r}")
            if wanted(name):
                yield name, kind in (b"0", b"\0", b"7"), source.take(size)
                source.skip(-size % 512)
            else:
                source.skip(size + -size % 512)

    def _pieces(self) -> Iterator[bytes]:
        name, _, kind = self._part.name.partition(".tar")
        limit = _unpacked_limit(self._part.size)
        self._file.seek(self._part.start)
        if kind == ".zst":
            return _by_dpkg(self._path, _BY_DPKG[name], limit)
        window = _Window(self._file, self._part.size)
        if not kind:
            return iter(lambda: window.read(_CHUNK), b"")
        if kind[1:] not in _DECOMPRESSORS:
            raise Damaged(f"{self._part.name} is compressed in an unknown way")
        return inflated(window, kind[1:], limit, self._note)

    def _note(self, stream: Any) -> None:
        if isinstance(stream, lzma.LZMADecompressor):
            self.checked = stream.check in (lzma.CHECK_CRC32, lzma.CHECK_CRC64, lzma.CHECK_SHA256)


def _header(head: bytes) -> tuple[str, bytes, int]:
    """Name, kind and size of a member, by its header of 512 bytes (see `man 5 tar`)."""
    blank = head[:148] + b" " * 8 + head[156:]
    if sum(blank) != _octal(head[148:156]):
        raise Damaged("the header of a file in it is damaged")
    name = head[:100].partition(b"\0")[0]
    if head[257:263] == b"ustar\0" and head[345]:
        name = head[345:500].partition(b"\0")[0] + b"/" + name
    # Sizes stand for what follows; links and folders have none.
    size = _octal(head[124:136]) if head[156:157] in (b"0", b"\0", b"7", b"L", b"K") else 0
    return name.decode("utf-8", "surrogateescape"), head[156:157], size


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise Damaged("a number in the header of a file in it is damaged")
    return int(digits or b"0", 8)


class _Window:
    """A part of a file, as a file."""

    def __init__(self, file: Any, size: int):
        self._file, self._left = file, size

    def read(self, size: int) -> bytes:
        chunk = self._file.read(min(size, self._left))
        self._left -= len(chunk)
        return chunk


class _Forward:
    """Pieces of bytes, to be taken in other pieces."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._piece, self._at = pieces, b"", 0

    def take(self, size: int) -> bytes:
        """The next bytes, so many."""
        pieces = []
        while size:
            if self._at == len(self._piece):
                self._piece, self._at = next(self._pieces, b""), 0
                if not self._piece:
                    raise Damaged("it is cut short")
            pieces.append(self._piece[self._at : self._at + size])
            self._at += len(pieces[-1])
            size -= len(pieces[-1])
        return b"".join(pieces)

    def skip(self, size: int) -> None:
        """Leaves out the next bytes."""
        while size:
            size -= len(self.take(min(size, _CHUNK)))


def _by_dpkg(path: Path, option: str, limit: int) -> Iterator[bytes]:
    size = 0
    with tempfile.TemporaryFile() as complaint:
        try:
            process = subprocess.Popen(
                ["dpkg-deb", option, str(path)], stdout=subprocess.PIPE, stderr=complaint
            )
        except OSError:
            raise Damaged("it is compressed by zstd, and there is no dpkg-deb to read it") from None
        with process:
            try:
                while piece := process.stdout.read(_CHUNK):
                    size += len(piece)
                    _hold(size, limit)
                    yield piece
            except BaseException:  # too much of it, or nobody wants the rest
                process.kill()
                raise
        if process.returncode:
            complaint.seek(0)
            said = complaint.read(1000).decode("utf-8", "replace").strip()
            raise Damaged(said or f"dpkg-deb ended with {process.returncode}")
