"""The suite as tests of pytest, for ``pytest --attention=package.module:function``.

Each promise on each case is one test. A refusal is skipped and says why; the first case that breaks a
promise is made smaller until it would no longer break, and the smallest is told. Paths given beside
``--attention`` are collected too; without any, nothing else is. ``-k`` and ``-n`` work as ever.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from crossattn.testing import promises
from crossattn.testing.case import Case
from crossattn.testing.checks import Broken
from crossattn.testing.shrink import describe, smallest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Appends the promises to what else was collected."""
    attend = promises.Watched(_named(str(config.getoption("attention"))))
    if attend.takes_arrays_alone:
        attend = promises.Watched(promises.with_arrays(attend.attend))
    broken: set[str] = set()
    for item in promises.items(quick=bool(config.getoption("attention_quick"))):
        name = f"{item.promise}[{item.case}]"
        own: dict[str, Any] = dict(item=item, attend=attend, broken=broken)
        items.append(Promise.from_parent(session, name=name, **own))


def _named(path: str) -> Callable:
    """Returns the function that ``package.module:function`` names."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise pytest.UsageError(f"--attention is {path!r}; expected package.module:function.")
    try:
        attend: Any = importlib.import_module(module)
        for part in name.split("."):
            attend = getattr(attend, part)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--attention={path} cannot be imported: {error}.") from error
    if not callable(attend):
        raise pytest.UsageError(f"--attention={path} is {type(attend).__name__}, not a function.")
    return attend


class Promise(pytest.Item):
    """Test of one promise on one case."""

    def __init__(
        self, *, item: promises.Item, attend: promises.Watched, broken: set[str], **arguments
    ):
        super().__init__(**arguments)
        self.promise, self.attend, self.broken = item, attend, broken

    def runtest(self) -> None:
        """Raises ``Broken`` with the smallest case, or skips what is refused."""
        outcome = promises.outcome(self.promise.check, self.attend)
        kind, _, said = outcome.partition(": ")
        if kind == "refused":
            pytest.skip(said)
        if kind == "worded otherwise":
            pytest.xfail(outcome)
        if kind == "broken":
            raise Broken(f"{said}{self._smallest(said)}")

    def _smallest(self, said: str) -> str:
        """Returns the smallest case, once for each promise; "" where a check has no case to shrink."""
        if self.promise.run is None or self.promise.promise in self.broken:
            return ""
        self.broken.add(self.promise.promise)
        run: Any = self.promise.run
        fault = _fault(said)
        last = [said]

        def breaks(case: Case) -> bool:
            outcome = promises.outcome(partial(run, case=case), self.attend)
            broken = outcome.startswith("broken: ") and _fault(outcome[8:]) == fault
            if broken:
                last[0] = outcome[8:]
            return broken

        case = smallest(promises.cases()[self.promise.case], breaks)
        return f"\n  smallest case: {describe(case)}\n  there: {last[0]}"

    def repr_failure(self, excinfo, style=None):
        """Returns the sentence alone: a traceback would show the suite."""
        if isinstance(excinfo.value, Broken):
            name = self.promise.promise
            return f"{name} ({promises.PROMISES[name]}) is broken: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        """Returns promise and case."""
        return self.path, None, self.name


def _fault(said: str) -> str:
    """Returns a fault without its numbers."""
    return said.split(":")[0].split(" is not 0")[0]
