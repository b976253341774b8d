"""Which backend takes a call of ``attend``: the platform's first that keeps the contract for it."""

import functools
import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp

from crossattn.ops import backends, platforms
from crossattn.ops.masks import Mask

PLAIN = ("chunked", "reference")
"""Backends without a kernel: they run anywhere, and on an accelerator more slowly than one."""


class Skipped(NamedTuple):
    """A backend that was passed over, and why: it refused, or another is the better choice."""

    backend: str
    reason: str
    refused: bool


class Refused(NotImplementedError):
    """No backend takes the call, or the one that was asked for does not."""

    def __init__(self, skipped: tuple[Skipped, ...], named: bool):
        self.skipped = skipped
        way = "backend=None, outside of use_backend," if backends.chosen() else "backend=None"
        hint = f"; {way} finds one that takes it" if named else ""
        who = "the backend asked for" if named else "every backend"
        super().__init__(f"{who} refuses this call: {_reasons(skipped)}{hint}.")


class DispatchResult(NamedTuple):
    """What a call gave, the backend that ran (None: an axis is of size 0) and those before it."""

    attended: backends.AttentionOutput
    backend: str | None
    skipped: tuple[Skipped, ...] = ()


_REUSED = ("return_rows", "known")


def first_that_fits(
    backend: str | None, q, k, v, mask: Mask | None, options: dict, wide: bool = False
) -> DispatchResult:
    """What the first backend gives, or the one that is named.

    With ``wide`` the output is float32 at least, of a part that is yet to be merged with others.

    Raises:
      Refused: none takes the call.
    """
    skipped = []
    plain = {name: x for name, x in options.items() if name not in _REUSED}
    trained = bool(options.get("return_rows")) or options.get("known") is not None
    for name in (backend,) if backend is not None else backends.ordered(platforms.platform()):
        module = backends.get(name)
        better = None if backend is not None else unsuited(name, q, k, trained)
        if better is not None:
            skipped.append(Skipped(name, better, False))
            continue
        try:
            own = options if getattr(module, "REUSES", False) else plain
            attended = call(module, q, k, v, mask, own, wide)
            return DispatchResult(attended, name, tuple(skipped))
        except NotImplementedError as refusal:
            skipped.append(Skipped(name, str(refusal), True))
    raise Refused(tuple(skipped), named=backend is not None)


def unsuited(name: str, q, k, trained: bool = False) -> str | None:
    """Why another backend is the better choice for operands of these shapes, or None.

    Few queries of a step that is ``trained`` are a kernel's too, for plain products keep their logits.
    """
    few = not trained and name not in PLAIN and platforms.platform() != "cpu"
    if few and backends.few_queries(q, k):
        return "for few queries, as in decoding, plain products read keys and values where they lie"
    module = backends.get(name)
    return module.unsuited(q, k) if hasattr(module, "unsuited") else None


def call(module: Any, q, k, v, mask, options: dict, wide: bool) -> backends.AttentionOutput:
    """A backend, whose output is float32 at least where that is asked for: see ``first_that_fits``.

    An accelerator's own kernels round what they give to the type of what they read; others do not.
    """
    if not wide:
        return module.attend(q, k, v, mask, **options)
    name = module.__name__.rpartition(".")[2]
    dtype = widened(q.dtype)
    if platforms.platform() == "cpu" or name in PLAIN:
        return module.attend(q.astype(dtype), k, v, mask, **options)
    attended = module.attend(q, k, v, mask, **options)
    return attended._replace(out=attended.out.astype(dtype))


def widened(dtype: Any) -> Any:
    """The type of sums: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)


def warn_where_slow(ran: DispatchResult) -> None:
    """On an accelerator, say it when plain JAX runs because every fused kernel refused."""
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
