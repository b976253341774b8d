"""A model made ready for programs that read its weights many times, as the loop of decoding does.

What layers do to their weights in each call is done once before, to the same numbers.
A layer that computes in bfloat16 rounds float32 weights; a scan takes each layer's out of a stacked array.
"""

from typing import Any

from flax import nnx

from crossattn.nn.decoding import DecoderStack
from crossattn.nn.layers import Embedding, Linear
from crossattn.nn.outputs import TokenOutput

# What these layers round in each call, whatever else they hold; norms keep float32.
_ROUNDED = {
    Linear: ("kernel", "bias"),
    nnx.LinearGeneral: ("kernel", "bias"),
    nnx.Linear: ("kernel", "bias"),
    nnx.Conv: ("kernel", "bias"),
    Embedding: ("table",),
    TokenOutput: ("table",),
}


def in_compute_dtype(model: Any) -> Any:
    """The model with each layer's weights in that layer's ``dtype``; one that is no module as it is.

    It gives what ``model`` gives, to the bit. Gradients are those of the rounded weights.
    """
    if not isinstance(model, nnx.Module):
        return model
    made = nnx.clone(model)
    for _, layer in nnx.iter_modules(made):
        dtype = getattr(layer, "dtype", None)
        for name in _ROUNDED.get(type(layer), ()) if dtype is not None else ():
            parameter = getattr(layer, name)
            if parameter is not None:
                parameter.set_value(parameter.get_value().astype(dtype))
    return made


def for_decoding(model: Any) -> Any:
    """``in_compute_dtype``, and its scanned decoder layers each with arrays of its own."""
    made = in_compute_dtype(model)
    if made is not model:
        for _, decoder in list(nnx.iter_modules(made)):
            if isinstance(decoder, DecoderStack):
                decoder.stack.unstack()
    return made


__all__ = ["for_decoding", "in_compute_dtype"]
