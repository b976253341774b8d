"""Kernels in C++, compiled for this machine's processor the first time that one is used.

Compiling takes seconds, once: the library is kept in ``~/.cache/crossattn`` (or ``XDG_CACHE_HOME``);
``python -m crossattn build`` compiles it ahead. Without a compiler, or with ``CROSSATTN_NATIVE=0``, there are
none, and ``load`` says why.
"""

import ctypes
import functools
import os
import threading

import jax

from crossattn.ops.native import build

_TARGETS = ("CrossattnForward", "CrossattnBackward", "CrossattnPack", "CrossattnProduct")
_LOADING = threading.Lock()


def load() -> None:
    """Makes the kernels known to XLA as FFI targets, for a call that is about to use one.

    Raises:
      NotImplementedError: this machine cannot have them, or not here; the message says why.
    """
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"it runs on CPU, not on {jax.default_backend()}")
    if jax.device_count() > 1 and not _one_device_at_a_time():
        raise NotImplementedError("XLA cannot partition it over several devices")
    with _LOADING:
        reason = _loaded()
    if reason:
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
    try:
        library = ctypes.CDLL(str(build.library()))
    except build.Unavailable as error:
        return str(error)
    except OSError as error:
        return f"it could not be loaded: {error}"
    for name in _TARGETS:
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return None
