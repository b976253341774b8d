"""Kernels in C++, compiled for this machine's processor the first time that one is used.

Compiling takes seconds, once: the library is kept in ``~/.cache/crossattn`` (or ``XDG_CACHE_HOME``).
Without a compiler, or with ``CROSSATTN_NATIVE=0``, there are none, and ``load`` says why.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

import jax

_FLAGS = (
    *(
        "-O3",
        "-std=c++17",
        "-fPIC",
        "-shared",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=fast",
        "-w",
    ),
    "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native",
)
_TARGETS = ("CrossattnForward", "CrossattnBackward", "CrossattnPack", "CrossattnProduct")


def load() -> None:
    """Makes the kernels known to XLA as FFI targets, for a call that is about to use one.

    Raises:
      NotImplementedError: this machine cannot have them, or not here; the message says why.
    """
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"it runs on CPU, not on {jax.default_backend()}")
    if jax.device_count() > 1 and not _one_device_at_a_time():
        raise NotImplementedError("XLA cannot partition it over several devices")
    if reason := _loaded():
        raise NotImplementedError(reason)


def _one_device_at_a_time() -> bool:
    """Inside ``shard_map`` over all axes of the mesh, where arrays are each device's own."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.axis_names) and set(mesh.manual_axes) == set(mesh.axis_names)


@functools.cache
def _loaded() -> str | None:
    """Why not, or None."""
    if os.environ.get("CROSSATTN_NATIVE") == "0":
        return "CROSSATTN_NATIVE=0 turns compiled kernels off"
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return "no C++ compiler (c++, g++ or clang++) was found to build it"
    try:
        library = ctypes.CDLL(str(_built(compiler, _sources())))
    except subprocess.CalledProcessError as error:
        return f"{compiler} could not build it: {(error.stderr.strip() or 'no message').splitlines()[0]}"
    except OSError as error:
        return f"it could not be built or loaded: {error}"
    for name in _TARGETS:
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return None


def _sources() -> dict[str, str]:
    """Text of the kernel's files by name."""
    files = resources.files(__name__).iterdir()
    kept = (file for file in files if file.name.endswith((".cc", ".h")))
    return {file.name: file.read_text(encoding="utf-8") for file in kept}


def _built(compiler: str, sources: dict[str, str]) -> Path:
    """The shared library of the sources: from the cache, else compiled into it."""
    made_from = sorted(sources.items()), _FLAGS, jax.__version__, _processor()
    key = hashlib.sha256(repr(made_from).encode())
    name = f"kernels-{key.hexdigest()[:16]}.so"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossattn"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        root = Path(tempfile.mkdtemp(prefix="crossattn-"))
    library = root / name
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        for file, text in sources.items():
            Path(scratch, file).write_text(text, encoding="utf-8")
        code = (str(Path(scratch, file)) for file in sources if file.endswith(".cc"))
        made = Path(scratch, name)
        command = [compiler, *_FLAGS, "-I", jax.ffi.include_dir(), *code, "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(library)  # whole or not at all, also when several processes build it
    return library


def _processor() -> str:
    """What ``-march=native`` depends on, as far as it can be told."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
