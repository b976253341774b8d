"""The position-wise network: two layers with a nonlinearity, or a gated one."""

import functools
from typing import Any, Literal

import jax
from flax import nnx

from crossattn.nn.layers import linear
from crossattn.nn.meshes import on_any_mesh
from crossattn.ops.dropout import dropout
from crossattn.types import Array, Float, Key

Activation = Literal[
    "relu", "gelu", "gelu_exact", "quick_gelu", "silu", "reglu", "geglu", "geglu_exact", "swiglu"
]

_gelu_exact = functools.partial(jax.nn.gelu, approximate=False)
_PLAIN = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": _gelu_exact,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
}
_GATED = {
    "reglu": jax.nn.relu,
    "geglu": jax.nn.gelu,
    "geglu_exact": _gelu_exact,
    "swiglu": jax.nn.silu,
}


def activate(name: Activation, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Applies the nonlinearity of that name; "gelu" is approximated by tanh, "quick_gelu" by a sigmoid.

    Source: Hendrycks and Gimpel 2016.
    """
    return _PLAIN[name](x)


class FeedForward(nnx.Module):
    """``act(x W1) W2``, or gated, ``(act(x W1) * x W3) W2``.

    It is attention to F learnt vectors with ``act`` in place of softmax: ``sum_f act(x k_f) v_f`` of column f
    of W1, its key, and row f of W2, its value.

    Args:
      dim: model size, D.
      hidden: F.
      activation: relu, gelu, gelu_exact, quick_gelu, silu; the gated forms reglu, geglu, geglu_exact, swiglu.
      use_bias: biases in the layers.
      dropout_rate: of the hidden features.
      dtype: computation dtype.

    Raises:
      ValueError: the activation is unknown.
    Source: Vaswani et al. 2017, equation 2; gates, Shazeer 2020; as attention, Geva et al. 2021, section 2.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        activation: Activation = "relu",
        *,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        if activation not in _PLAIN and activation not in _GATED:
            known = ", ".join([*_PLAIN, *_GATED])
            raise ValueError(f"activation is {activation!r}; expected one of {known}.")
        options: dict[str, Any] = dict(use_bias=use_bias, dtype=dtype, rngs=rngs)
        wider: dict[str, Any] = dict(in_axes=("embed",), out_axes=("mlp",), **options)
        self.up = linear(dim, hidden, **wider)
        self.gate = linear(dim, hidden, **wider) if activation in _GATED else None
        self.down = linear(hidden, dim, in_axes=("mlp",), out_axes=("embed",), **options)
        self.activation: Activation = activation
        self.dropout_rate = dropout_rate

    @on_any_mesh
    def __call__(
        self, x: Float[Array, "*B T D"], dropout_key: Key[Array, ""] | None = None
    ) -> Float[Array, "*B T D"]:
        """Computes [*B T D] -> [*B T D]; a key turns dropout on."""
        if self.gate is None:
            hidden = activate(self.activation, self.up(x))
        else:
            hidden = _GATED[self.activation](self.gate(x)) * self.up(x)
        return self.down(dropout(hidden, self.dropout_rate, dropout_key))
