"""Kernels behind ``attend``: one file each, found by name, and the choice among them.

A backend module has

* ``attend(call)``: an ``AttentionOutput`` for a ``Call``; or it raises ``NotImplementedError`` with the
  reason for which it cannot keep the contract for this call;
* ``rank(platform)``: its place among the backends tried on ``"cpu"``, ``"gpu"`` or ``"tpu"``, lowest
  first, or None when it must be asked for by name;
* and may have ``unsuited(q, k)``: the reason for which another backend is the better choice for
  operands of these shapes, though this one would serve them, or None. It is not asked when the
  backend was named.

To add a kernel, add a file.
"""

import contextlib
import functools
import importlib
import pkgutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import jax

from crossattn.ops import platforms
from crossattn.ops.call import AttentionOutput, Call
from crossattn.ops.promotion import widened

PLAIN = ("chunked", "reference")
"""Backends without a kernel: they run anywhere, and on an accelerator more slowly than one."""
_FEW = 64
"""With more queries, products in float32 take longer than reading for them."""
# Part of the key of jit's caches, so that what was compiled outside is not run inside.
_chosen = jax.make_user_context(None)


class Skipped(NamedTuple):
    """Backend that was passed over, and the reason: it refused, or another is the better choice."""

    backend: str
    reason: str
    refused: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ran:
    """Output of a call, the backend that ran (None: unknown, or none was needed), those passed over."""

    attended: AttentionOutput
    backend: str | None = field(default=None, metadata={"static": True})
    skipped: tuple[Skipped, ...] = field(default=(), metadata={"static": True})


class Refused(NotImplementedError):
    """Refusal of a call by every backend, or by the one that was named."""

    def __init__(self, skipped: tuple[Skipped, ...], named: bool):
        self.skipped = skipped
        way = "backend=None, outside of use_backend," if chosen() else "backend=None"
        hint = f"; {way} finds one that takes it" if named else ""
        who = "the backend asked for" if named else "every backend"
        super().__init__(f"{who} refuses this call: {_reasons(skipped)}{hint}.")


def first_that_fits(call: Call) -> Ran:
    """Runs the first backend that takes the call, or the one that is named.

    Raises:
      Refused: none takes the call.
    """
    skipped, named = [], call.backend is not None
    tried = (call.backend,) if call.backend is not None else ordered(platforms.platform())
    for name in tried:
        better = None if named else unsuited(name, call)
        if better is not None:
            skipped.append(Skipped(name, better, False))
            continue
        try:
            return Ran(run(name, call), name, tuple(skipped))
        except NotImplementedError as refusal:
            skipped.append(Skipped(name, str(refusal), True))
    raise Refused(tuple(skipped), named)


def unsuited(name: str, call: Call) -> str | None:
    """Returns the reason for which another backend is the better choice for these shapes, or None.

    Few queries of a training step are a kernel's too, for plain products keep their logits.
    """
    trained = call.return_rows or call.known is not None
    few = not trained and name not in PLAIN and platforms.platform() != "cpu"
    if few and few_queries(call.q, call.k):
        return "for few queries, as in decoding, plain products read keys and values where they lie"
    module = get(name)
    return module.unsuited(call.q, call.k) if hasattr(module, "unsuited") else None


def run(name: str, call: Call) -> AttentionOutput:
    """Runs a backend; for a ``wide`` call its output is float32 at least.

    An accelerator's own kernels round what they give to the type of what they read; others do not.
    """
    attend, dtype = get(name).attend, widened(call.q.dtype)
    if not call.wide:
        return attend(call)
    if platforms.platform() == "cpu" or name in PLAIN:
        return attend(replace(call, q=call.q.astype(dtype)))
    attended = attend(call)
    return attended._replace(out=attended.out.astype(dtype))


def few_queries(q: Any, k: Any) -> bool:
    """Returns whether queries are so few, as in decoding, that reading the memory takes the time.

    Plain products read them once, where they lie. Fused kernels of accelerators lay them out anew, and
    pad the queries: on v5e six times the bytes of keys and values are moved for any number of queries up
    to 128, and spared are float32 logits, which up to this limit weigh less than keys and values do.
    """
    T, N, K, H = *q.shape[-3:-1], *k.shape[-2:]
    if not isinstance(T, int) or platforms.platform() == "cpu":
        return T == 1
    return T <= _FEW and T * N <= K * H


def warn_where_slow(ran: Ran) -> None:
    """Warns where an accelerator runs plain JAX because every fused kernel refused."""
    platform = platforms.platform()
    fused = tuple(skip for skip in ran.skipped if skip.backend not in PLAIN)
    refused = fused and all(skip.refused for skip in fused)
    if platform in ("gpu", "tpu") and ran.backend in PLAIN and refused:
        _warn_once(platform, ran.backend, _reasons(fused))


def _reasons(skipped: tuple[Skipped, ...]) -> str:
    return "; ".join(f"{skip.backend}: {skip.reason}" for skip in skipped)


@functools.cache
def _warn_once(platform: str, backend: str, reasons: str) -> None:
    warnings.warn(
        f"attend runs {backend!r} on this {platform}, plain JAX, because every fused kernel refused "
        f"({reasons}). crossattn.explain says it for any call.",
        stacklevel=4,
    )


@functools.cache
def names() -> tuple[str, ...]:
    """Returns every backend's name, in alphabetical order."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


def get(name: str) -> ModuleType:
    """Returns the backend of that name.

    Raises:
      ValueError: there is none.
    """
    if name not in names():
        raise ValueError(
            f"backend is {name!r}; expected one of {', '.join(map(repr, names()))}, or None to choose."
        )
    return importlib.import_module(f"{__name__}.{name}")


@functools.cache
def ordered(platform: str) -> tuple[str, ...]:
    """Returns the backends that are tried on a platform, first choice first."""
    ranks = {name: get(name).rank(platform) for name in names()}
    return tuple(sorted((n for n, r in ranks.items() if r is not None), key=lambda n: ranks[n]))


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Selects the backend of every ``attend`` of this thread inside, in whole models too; None chooses again.

        with xa.use_backend("reference"):
            exported = jax.export.export(jax.jit(model))(tokens)

    A call's own ``backend=`` goes before it, and a call that the backend cannot take raises
    ``NotImplementedError`` with the reason. It acts where code is traced: functions under ``jax.jit`` are
    traced and compiled anew inside; what was lowered or exported before stays what it is. Backends other
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
    """Returns the backend of the innermost ``use_backend``; None outside of any."""
    return _chosen.value
