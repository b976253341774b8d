"""The promises of attend, each with the checks that hold a callable to it."""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from crossattn.ops.masks import Mask, causal
from crossattn.testing import bad_calls, checks, composition, families, meshes
from crossattn.testing.case import Case

PROMISES = {
    "float32 inside": "logits, softmax and sums in float32 at least, the result in q's dtype",
    "scale and softcap": "the logits are scaled, then capped, then the bias is added",
    "nothing to read": "a query that may read nothing yields exactly 0",
    "masked is not there": "NaN or Inf reaches only the queries that may read it",
    "shapes": "grouped heads, T != S, Hv != H, any batch axes, broadcasting masks and biases",
    "positions": "causality, windows and segments by position",
    "gradients": "of q, k, v and the bias; exactly 0 for what takes no part",
    "composition": "jit, grad, vmap, scan, remat, shard_map and sharded arrays change nothing",
    "meshes": "Explicit mesh axes, beside Auto and manual ones: each device its own part",
    "weights": "when asked for, they are there; exactly 0 where masked",
    "log-sum-exp": "of the logits that may be read, with its gradient; -inf for nothing",
    "errors": "a bad call raises ValueError naming the argument, what came and what was expected",
}
FAMILIES = {
    "float32 inside": (families.narrow, families.large),
    "scale and softcap": (families.scale_and_softcap,),
    "nothing to read": (families.masked_rows,),
    "masked is not there": (families.poison,),
    "shapes": (families.shapes, families.broadcasting),
    "positions": (families.masks,),
}
CALLS = {
    "float32 inside": (composition.float64_stays_float64,),
    "composition": composition.COMPOSITIONS,
    "meshes": meshes.MESHES,
}
# One of each kind: what `quick` runs.
QUICK = {
    "bfloat16", "logits_of_ten_thousands", "softcap_then_bias", "some_rows_read_nothing",
    "nan_in_padding", "nan_in_future_v", "no_mask_at_all", "two_batch_axes_padded",
    "values_narrower_than_keys", "one_query", "causal", "causal_with_offset_per_example",
    "bias_and_mask", "vmap_over_examples", "gradients_of_vmap", "scan_over_queries",
    "sharded_arrays", "shard_map", "explicit_axes", "mask_of_5x7", "mask_of_float32",
    "4_query_heads_for_3_key_heads",
}  # fmt: skip


class Item(NamedTuple):
    """Check of one promise on one case; ``check(attend)`` raises ``Broken`` where it is not kept.

    ``run(attend, case)``, where there is one, is the same check on any case.
    """

    promise: str
    case: str
    check: Callable[[Any], None]
    run: Callable[[Any, Case], None] | None = None


class Finding(NamedTuple):
    """Outcome of an item.

    It is "kept", "refused: why", "broken: what" or, of a bad call that was not answered, "worded otherwise:
    how".
    """

    promise: str
    case: str
    outcome: str

    @property
    def kind(self) -> str:
        """The outcome without its reason."""
        return self.outcome.split(":")[0]


@cache
def cases() -> dict[str, Case]:
    """Returns every case by name."""
    made = [case for family in FAMILIES.values() for make in family for case in make()]
    named = {case.name: case for case in made}
    assert len(named) == len(made), "two cases share a name"
    return named


def check(attend: Callable, case: Case) -> None:
    """Holds ``attend`` to one case: its output and, where rounding leaves them exact, its gradients.

    Raises:
      Broken: a number, a shape or a dtype is not the oracle's.
    """
    (checks.check_output_and_gradients if case.gradients else checks.check_output)(attend, case)


def items(quick: bool = False, promises: Iterable[str] | None = None) -> Iterator[Item]:
    """Yields what ``conformance`` runs, in the order of ``PROMISES``; ``quick`` is one of each kind."""
    chosen = list(PROMISES if promises is None else promises)
    unknown = [name for name in chosen if name not in PROMISES]
    if unknown:
        raise ValueError(f"promises has {unknown}; expected some of {', '.join(PROMISES)}.")
    for promise in chosen:
        yield from (item for item in _items_of(promise) if not quick or item.case in QUICK)


def _items_of(promise: str) -> Iterator[Item]:
    for call in CALLS.get(promise, ()):
        yield Item(promise, call.__name__, call)
    if promise == "errors":
        for call in bad_calls.bad_calls():
            yield Item(promise, call.name, partial(bad_calls.check_bad_call, call=call))
    for name, case in cases().items():
        run = _run_of(promise, case)
        if run is not None:
            yield Item(promise, name, lambda attend, run=run, case=case: run(attend, case), run)


def _run_of(promise: str, case: Case) -> Callable[[Any, Case], None] | None:
    """Returns the check of a promise on a case, or None: what breaks one promise is not counted again.

    Queries that read nothing and masked NaN are judged, gradients included, under their own promise.
    """
    empty, spoilt = case.reads_nothing.any(), case.name in _family("masked is not there")
    checked = {
        "weights": (checks.check_weights, True),
        "log-sum-exp": (checks.check_lse, True),
        "gradients": (checks.check_gradients, case.gradients and not empty and not spoilt),
        "nothing to read": (check, empty and not spoilt),
        "masked is not there": (check, spoilt),
    }
    family = case.name in _family(promise) and not case.reads_nothing.all()
    run, applies = checked.get(promise, (checks.check_output_where_read, family))
    return run if applies else None


@cache
def _family(promise: str) -> set[str]:
    return {case.name for make in FAMILIES.get(promise, ()) for case in make()}


def conformance(
    attend: Callable,
    quick: bool = False,
    promises: Iterable[str] | None = None,
    refusals: tuple[type[Exception], ...] = (NotImplementedError,),
) -> list[Finding]:
    """Holds any callable of attend's signature, or of a part of it, to every promise.

    ``attend(q, k, v, mask=, bias=, scale=, softcap=, return_weights=, return_lse=)`` is called with
    what a case needs and no more; ``mask`` is a ``Mask`` or a boolean array (see ``with_arrays``).

    Args:
      attend: the callable, differentiable by JAX.
      quick: one case of each kind rather than all.
      promises: some of the keys of ``PROMISES``; None for all.
      refusals: the exceptions by which it says that it does not take a call. A keyword argument that
        its signature lacks is a refusal always.

    Returns:
      One finding for each promise and case. Refused is not broken: nothing wrong was computed. Nor was
      it where a bad call raised an error that is of another type, or says less, than is promised:
      that is worded otherwise. A callable that takes arrays for masks and no ``Mask`` refuses each of
      these, and the finding names ``with_arrays``.
    """
    watched = Watched(attend)
    return [
        Finding(item.promise, item.case, outcome(item.check, watched, refusals))
        for item in items(quick, promises)
    ]


class Watched:
    """Callable that notes whether it was given a ``Mask`` since that was last asked."""

    def __init__(self, attend: Callable):
        self.attend, self.masked = attend, False

    def __call__(self, *arguments, **options):
        given = (*arguments, *options.values())
        self.masked = self.masked or any(isinstance(x, Mask) for x in given)
        return self.attend(*arguments, **options)

    @cached_property
    def takes_arrays_alone(self) -> bool:
        """True where it fails with a ``Mask`` for its mask, and not with the same as an array."""
        x = np.zeros((1, 2, 1, 4), np.float32)
        try:
            self.attend(x, x, x, mask=causal())
        except Exception:
            try:
                with_arrays(self.attend)(x, x, x, mask=causal())
            except Exception:
                return False
            return True
        return False


def outcome(run, attend: Watched, refusals=(NotImplementedError,)) -> str:
    """Returns the outcome of a check in the words of a ``Finding``."""
    attend.masked = False
    try:
        run(attend)
    except checks.Broken as broken:
        return f"broken: {broken}"
    except bad_calls.OtherError as error:
        return f"worded otherwise: {line(error)}"
    except Exception as error:
        if attend.masked and attend.takes_arrays_alone:
            said = f"{type(error).__name__}: {line(error)}"
            return f"refused: it takes no Mask; give the suite testing.with_arrays(attend) ({said})"
        if isinstance(error, refusals) or bad_calls.lacks_argument(error):
            return f"refused: {line(error)}"
        return f"broken: {type(error).__name__}: {line(error)}"
    return "kept"


def line(error: Exception) -> str:
    said = str(error).strip() or type(error).__name__
    return said.splitlines()[0][:200]


def with_arrays(attend: Callable) -> Callable:
    """Returns ``attend`` for callables that know no ``Mask``: it is given the boolean array [*B N T S]."""

    def call(q, k, v, mask=None, **options):
        if isinstance(mask, Mask):
            T, S = q.shape[-3], k.shape[-3]
            mask = mask.materialize(T, S)
            mask = mask.reshape((1,) * (q.ndim - mask.ndim) + mask.shape)
        if mask is not None:
            options["mask"] = mask
        return attend(q, k, v, **options)

    return call
