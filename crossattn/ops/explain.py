"""``explain``: which backend ``attend`` would run for a call, and why the others would not.

It traces the very code of ``attend`` on shapes alone: nothing is computed, and no memory is taken.
"""

from dataclasses import dataclass
from typing import Any

import jax

from crossattn.ops import attend as attending
from crossattn.ops import backends, platforms
from crossattn.ops.backends import Ran, Refused
from crossattn.ops.call import AttentionOutput
from crossattn.ops.masks import AnyOf, Mask, Not

_NAMES = ("bias", "scale", "softcap", "dropout_rate", "dropout_key", "return_weights", "return_lse")


@dataclass(frozen=True)
class Explanation:
    """Backend that ``attend`` would run for a call, with the reasons of all refusals; ``print`` it.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      call: the call in a line.
      backend: the name of the backend that would run; None where there is nothing to compute
        (no query, or no key) or where no backend takes the call.
      refused: backend -> the reason for which it cannot keep the contract for this call.
      unsuited: backend -> the reason for which another is the better choice.
      untried: backends that come after the one that runs, or must be asked for by name.
    """

    platform: str
    call: str
    backend: str | None
    refused: dict[str, str]
    unsuited: dict[str, str]
    untried: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"attend on {self.platform}: {self.call}"]
        why = (
            "every backend asked refused"
            if self.refused
            else "there is no query, or no key to read"
        )
        lines.append(f"  runs      {self.backend or 'nothing: ' + why}")
        for what, reasons in (("refused", self.refused), ("unsuited", self.unsuited)):
            lines += [f"  {what:<9} {name}: {reason}" for name, reason in reasons.items()]
        if self.untried:
            lines.append(f"  not asked {', '.join(self.untried)}")
        return "\n".join(lines)


def explain(
    q: Any, k: Any, v: Any, mask: Any = None, *, backend: str | None = None, **options: Any
) -> Explanation:
    """Returns the backend of ``attend(q, k, v, mask, ...)`` on this machine, and each refusal's reason.

    Arguments are those of ``attend``; arrays may be ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: the call is one that ``attend`` itself refuses, in the same words.
      TypeError: an option that ``attend`` does not have.
    """
    unknown = sorted(options.keys() - set(_NAMES))
    if unknown:
        raise TypeError(f"explain got {unknown}; expected options of attend: {', '.join(_NAMES)}.")
    ran = _trace(q, k, v, mask, backend, options)
    asked = {skip.backend for skip in ran.skipped} | {ran.backend}
    return Explanation(
        platform=platforms.platform(),
        call=_describe(q, k, v, mask, options),
        backend=ran.backend,
        refused={skip.backend: skip.reason for skip in ran.skipped if skip.refused},
        unsuited={skip.backend: skip.reason for skip in ran.skipped if not skip.refused},
        untried=tuple(name for name in backends.names() if name not in asked),
    )


def _trace(q, k, v, mask, backend, options: dict[str, Any]) -> Ran:
    """Traces ``attend`` with every array replaced by its shape."""
    dispatched = []
    given = {"q": q, "k": k, "v": v, "mask": mask, **options}
    arrays = {name: x for name, x in given.items() if isinstance(x, Mask) or hasattr(x, "shape")}

    def call(arrays):
        dispatched.append(attending.run(backend=backend, late=False, **{**given, **arrays}))

    try:
        with platforms.lowered_for(platforms.target_of(jax.tree.leaves(arrays))):
            jax.eval_shape(call, arrays)
    except Refused as refusal:
        return Ran(AttentionOutput(None), None, refusal.skipped)
    return dispatched[0]


def _describe(q, k, v, mask, options: dict[str, Any]) -> str:
    arrays = [f"{name} {x.dtype}{list(x.shape)}" for name, x in zip("qkv", (q, k, v), strict=True)]
    said = [] if mask is None else [f"mask {_name(mask)}"]
    for name, value in options.items():
        if value is not None and value is not False:
            shape = f" {list(value.shape)}" if getattr(value, "shape", ()) else f"={value}"
            said.append(name if value is True or name == "dropout_key" else name + shape)
    return ", ".join([*arrays, *said])


def _name(mask) -> str:
    if not isinstance(mask, Mask):
        return f"{mask.dtype}{list(mask.shape)}"
    names = []
    for term in mask.terms:
        if isinstance(term, AnyOf):
            names.append(f"({' | '.join(_name(one) for one in term.masks)})")
        elif isinstance(term, Not):
            names.append(f"~({_name(term.mask)})")
        else:
            names.append(type(term).__name__)
    return " & ".join(names) or "of everything"
