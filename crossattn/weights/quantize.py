"""int8 weights: a quarter of the bytes at rest, for models that are not trained.

Matrices become ``qwix.QArray`` leaves of the nested dict, which go through ``jax.jit`` like arrays and are
multiplied out where ``functional.bind`` makes the module.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from crossattn import functional
from crossattn.types import Params
from crossattn.weights.rules import input_axes


def quantize(build: functional.Build, params: Params) -> Params:
    """Returns parameters whose matrices are int8, with a float32 scale for each output channel, symmetric.

    A scale is the largest magnitude of a channel over 127.5, so no weight moves by more than half of it.
    The channels of a kernel are its outputs; those of a vocabulary's table are its tokens, in an
    embedding and in an output layer. Norms, biases and positions stay as they are.

    This saves bytes at rest and in the arguments of a call, not within it: ``bind`` stands before the loop of
    a search, which makes float32 matrices once and reads those at each step. Whisper tiny.en is 40 MB instead
    of 151; its search takes 33 MB of arguments and 150 MB of temporaries instead of 121 and 23, in about the
    same time (XLA on CPU).

    Args:
      build: makes the module of ``params``; its logical axes tell which parameters are matrices.

    Raises:
      ValueError: ``params`` are another model's.
      ImportError: qwix is missing.
    Source: Jacob et al. 2018, section 2; Krishnamoorthi 2018, section 3.1.
    """
    functional.check(build, params)
    shrunk, flat = quantizer(build), functional.flatten(params)
    return functional.nest({path: shrunk(path, param) for path, param in flat.items()})


def quantizer(build: functional.Build) -> Callable[[str, Any], Any]:
    """Returns ``quantize`` for one parameter at a time, given its path and the parameter."""
    try:
        import qwix
    except ImportError:
        raise ImportError("int8 weights need qwix: pip install 'crossattn[weights]'") from None
    axes = functional.flatten(functional.logical_axes(build))

    def shrunk(path: str, param: Any) -> Any:
        channels = _channels(path, axes[path])
        if channels is None or functional.is_quantized(param):
            return param
        return qwix.quantize(jnp.asarray(param, jnp.float32), jnp.int8, channelwise_axes=channels)

    return shrunk


def _channels(path: str, axes: tuple) -> tuple[int, ...] | None:
    """Returns the axes of a matrix's channels; None for another parameter."""
    if axes[:1] == ("layers",):  # scanned: a matrix a layer
        inner = _channels(path, axes[1:])
        return None if inner is None else (0, *(axis + 1 for axis in inner))
    if path.endswith("kernel"):
        return tuple(range(input_axes(axes), len(axes)))
    return (0,) if axes == ("vocab", "embed") else None
