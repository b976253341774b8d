"""A conformance suite for attention: what ``attend`` promises, held against float64 numpy.

    from crossattn import testing

    for finding in testing.conformance(my_attend):
        print(*finding)          # promise, case, "kept" | "refused: why" | "broken: what"

It takes any callable of attend's signature, or of a part of it, and needs numpy and JAX alone. A
callable that does not take a call raises ``NotImplementedError``, which is a refusal and not a fault;
one that takes arrays for masks is held to the suite as ``testing.with_arrays(my_attend)``. An error of a
bad call that names less than is promised is "worded otherwise: how", apart from what is broken.
Tests may go case by case: ``testing.check(my_attend, testing.cases()["nan_in_padding"])``.

``crossattn.testing.models`` is the suite for whole models, of any library.
"""

from crossattn.testing.case import Case
from crossattn.testing.checks import Broken, check_gradients, check_lse, check_output, check_weights
from crossattn.testing.promises import (
    PROMISES,
    Finding,
    Item,
    cases,
    check,
    conformance,
    items,
    with_arrays,
)

__all__ = [
    "PROMISES",
    "Broken",
    "Case",
    "Finding",
    "Item",
    "cases",
    "check",
    "check_gradients",
    "check_lse",
    "check_output",
    "check_weights",
    "conformance",
    "items",
    "with_arrays",
]
