"""Kernels behind ``attend``: one file each, found by name, all with one signature.

A backend module has

* ``attend(q, k, v, mask, *, bias, scale, softcap, dropout_rate, dropout_key, return_weights,
  return_lse)`` that returns an ``AttentionOutput``, or raises ``NotImplementedError`` with the reason for
  which it cannot keep the contract for this call;
* ``rank(platform)``: its place among the backends tried on ``"cpu"``, ``"gpu"`` or ``"tpu"``, lowest
  first, or None when it must be asked for by name;
* and may have ``unsuited(q, k)``: the reason for which another backend is the better choice for
  operands of these shapes, though this one would serve them, or None. It is not asked when the
  backend was named;
* and may say ``REUSES = True``: its ``attend`` takes ``return_rows``, for ``AttentionOutput.rows``, and
  ``known``, (out, peak, sum) as an earlier call with the same operands gave them, whose gradients it then
  gives without computing them again.

To add a kernel, add a file.
"""

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax

from crossattn.ops import platforms

_FEW = 64
"""With more queries, products in float32 take longer than reading for them."""
# Part of the key of jit's caches, so that what was compiled outside is not run inside.
_chosen = jax.make_user_context(None)


class AttentionOutput(NamedTuple):
    """What a backend gives back; None is what it was not asked for.

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


@functools.cache
def names() -> tuple[str, ...]:
    """Every backend's name, in alphabetical order."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


def get(name: str) -> ModuleType:
    """The backend of that name.

    Raises:
      ValueError: there is none.
    """
    if name not in names():
        raise ValueError(
            f"backend is {name!r}; expected one of {', '.join(map(repr, names()))}, or None to choose."
        )
    return importlib.import_module(f"{__name__}.{name}")


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Inside, every ``attend`` of this thread runs that backend, in whole models too; None chooses again.

        with xa.use_backend("reference"):
            exported = jax.export.export(jax.jit(model))(tokens)

    A call's own ``backend=`` goes before it, and a call that the backend cannot take raises
    ``NotImplementedError`` with the reason. It acts where code is traced: functions under ``jax.jit`` are
    traced and
    compiled anew inside, while what was lowered or exported before stays what it is. Backends other
    than "cpu" leave out the compiled matrix products of decoding too, so that only XLA's operations
    remain with "reference" and "chunked".

    Raises:
      ValueError: there is no backend of that name.
    """
    if name is not None:
        get(name)
    with _chosen(name):
        yield


def chosen() -> str | None:
    """The backend of the innermost ``use_backend``; None outside of any."""
    return _chosen.value


def few_queries(q: Any, k: Any) -> bool:
    """Whether queries are so few, as in decoding, that reading keys and values is what takes the time.

    Plain products read them once, where they lie. Fused kernels of accelerators lay them out anew, and
    pad the queries: on v5e six times the bytes of keys and values are moved for any number of queries up
    to 128, and spared are float32 logits, which up to this limit weigh less than keys and values do.
    """
    T, N, K, H = *q.shape[-3:-1], *k.shape[-2:]
    if not isinstance(T, int) or platforms.platform() == "cpu":
        return T == 1
    return T <= _FEW and T * N <= K * H


@functools.cache
def ordered(platform: str) -> tuple[str, ...]:
    """The backends that are tried on a platform, first choice first."""
    ranks = {name: get(name).rank(platform) for name in names()}
    return tuple(sorted((n for n, r in ranks.items() if r is not None), key=lambda n: ranks[n]))
