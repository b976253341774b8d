"""Models prepared for programs that read their weights many times, such as the loop of decoding.

They convert weights once instead of in each call: a layer that computes in bfloat16 rounds float32 weights,
and a scan slices each layer's weights from a stacked array.
"""

from typing import Any

from flax import nnx

from crossattn.nn.decoding import DecoderStack
from crossattn.nn.layers import Embedding, Linear
from crossattn.nn.outputs import TokenOutput

# The parameters that layers round in each call; norms keep float32.
_ROUNDED = {
    Linear: ("kernel", "bias"),
    nnx.LinearGeneral: ("kernel", "bias"),
    nnx.Linear: ("kernel", "bias"),
    nnx.Conv: ("kernel", "bias"),
    Embedding: ("table",),
    TokenOutput: ("table",),
}


def in_compute_dtype(model: Any) -> Any:
    """Converts each layer's weights to that layer's ``dtype``; a model that is no module stays as it is.

    Outputs equal those of ``model`` bit by bit. Gradients are those of the rounded weights.
    """
    if not isinstance(model, nnx.Module):
        return model
    made = nnx.clone(model)
    for _, layer in nnx.iter_modules(made):
        for name in _ROUNDED.get(type(layer), ()):
            parameter = getattr(layer, name)
            if parameter is not None and layer.dtype is not None:
                parameter.set_value(parameter.get_value().astype(layer.dtype))
    return made


def for_decoding(model: Any) -> Any:
    """Applies ``in_compute_dtype``, and gives each scanned decoder layer arrays of its own."""
    made = in_compute_dtype(model)
    if made is not model:
        for _, decoder in list(nnx.iter_modules(made)):
            if isinstance(decoder, DecoderStack):
                decoder.stack.unstack()
    return made
