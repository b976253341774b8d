"""A call of ``attend`` as one value, which goes from ``attend`` to a backend, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from crossattn.ops.masks import Mask
from crossattn.types import Array, Shaped


class AttentionOutput(NamedTuple):
    """Results of a backend; None for those that were not requested.

    Attributes:
      out: [*B T N Hv], in the dtype of the queries.
      weights: float32 [*B N T S], before dropout.
      lse: float32 [*B N T], log of the sum of the exponentials of what each query may read.
      rows: [*B N T] both, the largest logit and the sum of all exponentials relative to it: what a
        backward pass needs beside the output. None from backends that do not reuse it.
    """

    out: Any
    weights: Any = None
    lse: Any = None
    rows: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Call:
    """Arguments of ``attend`` after they were checked; a pytree of its arrays.

    Attributes:
      q, k, v: [*B T N H], [*B S K H], [*B S K Hv].
      mask: None where it hides nothing.
      bias: [*#B #N #T #S], or None.
      scale: of the logits, a number or an array [].
      softcap: likewise, or None.
      dropout_key: None where nothing is dropped.
      known: (out, peak, sum) as an earlier call with the same operands gave them: a backend that reuses
        them gives their gradients without computing them again.
      dropout_rate: probability of dropping a weight.
      return_weights, return_lse: what is asked for beside the output.
      return_rows: whether ``AttentionOutput.rows`` is, by a backend that reuses them.
      wide: whether the output is float32 at least, of a part that is yet to be merged with others.
      backend: the one that was asked for by name.
    """

    q: Any
    k: Any
    v: Any
    mask: Mask | None = None
    bias: Any = None
    scale: Any = 1.0
    softcap: Any = None
    dropout_key: Any = None
    known: Any = None
    dropout_rate: float = field(default=0.0, metadata={"static": True})
    return_weights: bool = field(default=False, metadata={"static": True})
    return_lse: bool = field(default=False, metadata={"static": True})
    return_rows: bool = field(default=False, metadata={"static": True})
    wide: bool = field(default=False, metadata={"static": True})
    backend: str | None = field(default=None, metadata={"static": True})

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.q.shape[-3], self.k.shape[-3]

    @property
    def symbolic(self) -> bool:
        """True where a size is one of ``jax.export``'s symbols."""
        return is_symbolic(*self.q.shape, *self.k.shape)

    def refuse(self, who: str, *lacks: str) -> None:
        """Raises NotImplementedError where the call asks for something that a kernel lacks.

        Args:
          who: the kernel, as the sentence begins.
          lacks: "weights", "log-sum-exp", "bias", "softcap", "traced softcap", "dropout" or "float64".
        """
        plain = self.softcap is None or isinstance(self.softcap, (int, float))
        reasons = {
            "weights": (self.return_weights, "never has the weights"),
            "log-sum-exp": (self.return_lse, "does not return the log-sum-exp with a gradient"),
            "bias": (self.bias is not None, "has no bias"),
            "softcap": (self.softcap is not None, "has no softcap"),
            "traced softcap": (not plain, "takes a softcap that is a plain number"),
            "dropout": (self.dropout_key is not None, "has no dropout"),
            "float64": (self.q.dtype == jnp.float64, "computes in float32"),
        }
        for name in lacks:
            asked, reason = reasons[name]
            if asked:
                raise NotImplementedError(f"{who} {reason}")


def by_query(rows: Shaped[Array, "*#B #N #T"]) -> Shaped[Array, "*#B #T #N 1"]:
    """Returns a value of each row of logits in the layout of the output."""
    return jnp.moveaxis(rows, -1, -2)[..., None]


def is_symbolic(*sizes: Any) -> bool:
    """Returns whether a size is one of ``jax.export``'s symbols, known only when the program is called."""
    return any(map(jax.export.is_symbolic_dim, sizes))


class Names(tuple):
    """Name of each axis of an array: a batch axis by its number, 1 the innermost; "N", "T", "S"; None."""


def named(x: Any, *inner: Any) -> Names:
    """Returns the names of an array's axes, given the last ones; those before them are batch axes.

    An array of fewer axes has the last of them.
    """
    axes = jnp.ndim(x)
    return Names((*range(axes - len(inner), 0, -1), *inner[max(len(inner) - axes, 0) :]))


@dataclass(frozen=True)
class Form:
    """Call without its arrays: the part that is known before a program runs.

    Attributes:
      structure: of its leaves.
      numbers: those of them that are plain numbers, by their place.
      inner: of the arrays, what their axes after those of the batch are; None for a number.
    """

    structure: Any
    numbers: tuple[tuple[int, Any], ...]
    inner: tuple[tuple[Any, ...] | None, ...]

    def call(self, arrays: Sequence[Any]) -> Call:
        """Returns the call with these arrays."""
        leaves = list(arrays)
        for place, number in self.numbers:
            leaves.insert(place, number)
        return self.structure.unflatten(leaves)

    def names(self, arrays: Sequence[Any]) -> list[Names | None]:
        """Returns the names of each array's axes."""
        pairs = zip(arrays, self.inner, strict=True)
        return [None if inner is None else named(x, *inner) for x, inner in pairs]


def taken_apart(call: Call) -> tuple[list[Any], Form]:
    """Returns a call's arrays, q, k and v first, and its comparable rest."""
    leaves, structure = jax.tree.flatten(call)
    queries, keys, rows = ("T", "N", None), ("S", "N", None), ("N", "T")
    inner: list[Any] = [queries, keys, keys]
    inner += [] if call.mask is None else [axes for *_, axes in call.mask.arrays()]
    inner += [] if call.bias is None else [("N", "T", "S")]
    inner += [None for x in (call.scale, call.softcap, call.dropout_key) if x is not None]
    inner += [] if call.known is None else [queries, rows, rows]
    numbers = tuple((i, x) for i, x in enumerate(leaves) if not hasattr(x, "dtype"))
    pairs = [(x, n) for x, n in zip(leaves, inner, strict=True) if hasattr(x, "dtype")]
    return [x for x, _ in pairs], Form(structure, numbers, tuple(n for _, n in pairs))
