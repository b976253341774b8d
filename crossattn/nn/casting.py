"""Parameters in the type that layers compute in, for programs that read them many times, as decoding does.

The one thing to know: a layer that computes in bfloat16 rounds its float32 weights in each call. Rounded
once before, they give the same numbers, and every call reads half the bytes.
"""

from typing import Any

from flax import nnx

from crossattn.nn.layers import Embedding
from crossattn.nn.outputs import TokenOutput

# What these layers cast in each call, whatever else they hold; norms keep float32.
_CAST = {
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
    cast = nnx.clone(model)
    for _, layer in nnx.iter_modules(cast):
        dtype = getattr(layer, "dtype", None)
        for name in _CAST.get(type(layer), ()) if dtype is not None else ():
            parameter = getattr(layer, name)
            if parameter is not None:
                parameter.set_value(parameter.get_value().astype(dtype))
    return cast


__all__ = ["in_compute_dtype"]
