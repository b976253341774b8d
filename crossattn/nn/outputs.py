"""Output heads on a stack's last vectors: logits of tokens or classes, or vectors with a stop logit.

``TokenOutput`` may share its table with an embedding.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import jax.numpy as jnp
from flax import nnx

from crossattn.nn.feedforward import Activation, activate
from crossattn.nn.layers import Embedding, linear, token_logits
from crossattn.nn.meshes import on_any_mesh
from crossattn.nn.sublayers import BlockConfig
from crossattn.types import Array, Float

_Arguments = ParamSpec("_Arguments")


def logits_of(
    hidden: Callable[Concatenate[Any, _Arguments], Any],
) -> Callable[[Callable], Callable[Concatenate[Any, _Arguments], Any]]:
    """Makes the ``__call__`` of a model, with the arguments of ``hidden`` and the decorated docstring.

    It returns the ``logits`` of the first result of ``hidden``, and the further results that are not None.
    """

    def decorate(described: Callable) -> Callable[Concatenate[Any, _Arguments], Any]:
        @functools.wraps(described)
        def call(self: Any, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Any:
            found = self.hidden(*args, **kwargs)
            if not isinstance(found, tuple):
                return self.logits(found)
            vectors, *others = found
            others = [x for x in others if x is not None]
            return (self.logits(vectors), *others) if others else self.logits(vectors)

        found = on_any_mesh(call)
        own = inspect.signature(hidden).replace(return_annotation=Any)
        setattr(found, "__signature__", own)  # noqa: B010
        return found

    return decorate


@dataclass(frozen=True)
class OutputConfig:
    """The options of ``TokenOutput`` besides its table.

    Attributes:
      scale: factor of the vectors (T5's tied models, ``dim ** -0.5``).
      transform: a dense layer with the blocks' activation and norm comes first (BERT).
      bias: a number for each token, added to the logits (BART, Marian, BERT).
    """

    scale: float = 1.0
    transform: bool = False
    bias: bool = False


class TokenOutput(nnx.Module):
    """The output layer; its table is its own, or the embedding's.

    Args:
      vocab_size: V.
      block: shape of the blocks below; or their size D, which is enough without a transform.
      config: scale, transform and bias.
      tied: the table is that of the embedding, which calls pass.
      dtype: computation dtype, that of the vectors that come in; by default the block's.

    Raises:
      ValueError: a transform is to have the activation and the norm of blocks of which only the size came.
    """

    def __init__(
        self,
        vocab_size: int,
        block: BlockConfig | int,
        config: OutputConfig = OutputConfig(),
        *,
        tied: bool = False,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        dim = block if isinstance(block, int) else block.dim
        self.table = None if tied else Embedding(vocab_size, dim, rngs=rngs).table
        self.bias = nnx.Param(jnp.zeros(vocab_size), axes=("vocab",)) if config.bias else None
        self.scale = config.scale
        self.dtype = dtype if isinstance(block, int) or dtype is not None else block.dtype
        if not config.transform:
            self.dense, self.norm = None, None
            return
        if isinstance(block, int):
            raise ValueError(
                f"block is {block}, a size; a transform expects the BlockConfig whose activation and norm"
                " it has."
            )
        options: dict[str, Any] = dict(in_axes=("embed",), out_axes=("mlp",), dtype=self.dtype)
        self.dense: Any = linear(dim, dim, **options, rngs=rngs)
        self.norm: Any = block.normalise(rngs)
        self.activation: Activation = block.mlp.activation

    def rows(self, embedding: Embedding) -> Float[Array, "V D"]:
        """Returns the table, one row a token.

        Raises:
          ValueError: the output layer also has a bias, a scale or a transform.
        """
        if self.bias is not None or self.dense is not None or self.scale != 1.0:
            raise ValueError(
                "this output layer has a bias, a scale or a transform besides its table; "
                "use output_product() or logits()."
            )
        return self._table(embedding)

    def product(
        self, x: Float[Array, "*B T D"], embedding: Embedding
    ) -> tuple[Float[Array, "*B T E"], Float[Array, "V E"]]:
        """Returns the factors of ``logits``; a bias becomes one more column of the table, E = D + 1."""
        x, table = self._transformed(x), self._table(embedding)
        if self.bias is None:
            return x, table
        ones = jnp.ones_like(x[..., :1])
        bias = self.bias[...][:, None].astype(table.dtype)
        return jnp.concatenate([x, ones], -1), jnp.concatenate([table, bias], -1)

    def logits(self, x: Float[Array, "*B T D"], embedding: Embedding) -> Float[Array, "*B T V"]:
        """Computes scores of every token, float32."""
        scores = token_logits(self._transformed(x), self._table(embedding))
        return scores if self.bias is None else scores + self.bias[...]

    def _transformed(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """Applies the transform and the scale."""
        if self.dense is not None:
            x = self.norm(activate(self.activation, self.dense(x)))
        return x if self.scale == 1.0 else x * self.scale

    def _table(self, embedding: Embedding) -> Float[Array, "V D"]:
        return (embedding.table if self.table is None else self.table)[...]


class ClassOutput(nnx.Module):
    """Logits of classes; of an image, a text, a region or each position of a sequence.

    Args:
      dim: size of the vectors, D.
      num_classes: C.
      dtype: computation dtype.
    """

    def __init__(self, dim: int, num_classes: int, *, dtype: Any = None, rngs: nnx.Rngs):
        self.linear = linear(
            dim, num_classes, in_axes=("embed",), out_axes=("classes",), dtype=dtype, rngs=rngs
        )

    @on_any_mesh
    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B C"]:
        """Computes scores of every class, float32."""
        return self.linear(x).astype(jnp.float32)


class VectorOutput(nnx.Module):
    """Vectors (frames of a spectrogram, patches, embeddings), and a logit that their sequence ends.

    Args:
      dim: size of the stack's vectors, D.
      size: of each output vector, M.
      dtype: computation dtype.

    Source: the stop token, Shen et al. 2018, "Tacotron 2"; Li et al. 2019, section 3.5.
    """

    def __init__(self, dim: int, size: int, *, dtype: Any = None, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(in_axes=("embed",), dtype=dtype, rngs=rngs)
        self.linear = linear(dim, size, out_axes=("mlp",), **options)
        self.stop = linear(dim, 1, out_axes=("classes",), **options)

    @on_any_mesh
    def __call__(
        self, x: Float[Array, "*B T D"]
    ) -> tuple[Float[Array, "*B T M"], Float[Array, "*B T"]]:
        """Computes vectors, and the logit that each is the last one; both float32."""
        stop = self.stop(x)[..., 0]
        return self.linear(x).astype(jnp.float32), stop.astype(jnp.float32)
