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

from crossattn.ops import platforms
from crossattn.ops.native import build

_TARGETS = [f"Crossattn{name}" for name in ("Forward", "Backward", "Pack", "Product", "Row")]
_LOADING = threading.Lock()


def load() -> None:
    """Makes the kernels known to XLA as FFI targets, for a call that is about to use one.

    Raises:
      NotImplementedError: this machine cannot have them, or not here; the message says why.
    """
    if platforms.platform() != "cpu":
        raise NotImplementedError(f"it runs on CPU, not on {platforms.platform()}")
    if not platforms.one_device():
        raise NotImplementedError("XLA cannot partition it over several devices")
    if reason := missing():
        raise NotImplementedError(reason)


def missing() -> str | None:
    """Returns the reason for which this machine has no kernels; None where it has them."""
    with _LOADING:
        return _loaded()


@functools.cache
def _loaded() -> str | None:
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
