"""Promises kept by each backend here and by other libraries, by the suites of ``crossattn.testing``.

    python -m experiments.bench.conformance [--models] [--quick] [--only=NAME,..] [--json=FILE]

With ``--models`` it is models that are held to promises, ours and small random ones of ``transformers``.
Exits with 1 if a backend or a model of this library breaks a promise, error messages included.
"""

import collections
import importlib.metadata
import json
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import jax

import crossattn as xa
from crossattn import testing
from crossattn.ops import backends
from crossattn.testing import models
from experiments import launch
from experiments.bench import contest, contestants, model_contestants
from experiments.options import Options

REFUSALS = (Exception,)  # another library that raises has given no wrong answer
NOT_ASKED = {"errors"}  # each library has its own messages
NOT_ASKED_OF_TORCH = {"composition", "meshes"}  # they would test the callback from JAX

Findings = dict[str, list[testing.Finding]]


def main(arguments: list[str] | None = None) -> int:
    """Runs, prints, and returns the exit code."""
    parser = Options(__doc__)
    parser.add_argument("--models", action="store_true", help="models, not attention functions")
    parser.add_argument("--quick", action="store_true", help="one case of each kind of function")
    parser.add_argument("--only", default="", metavar="NAME,..", help="some of those in the table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there")
    options = parser.parse_args(arguments)
    only = set(filter(None, options.only.split(",")))
    if options.models:
        others, missing = model_contestants.others()
        ours, foreign = (
            {name: partial(_held, make) for name, make in made.items()}
            for made in (model_contestants.ours(), others)
        )
        versions = _versions(["transformers", "torch"] if others else [])
    else:
        others, missing = contestants.installed()
        ours, foreign = _ours(), {name: _asked(name, call) for name, call in others.items()}
        versions = _versions(others)
    unknown = only - ours.keys() - foreign.keys()
    if unknown:
        parser.error(
            f"--only={','.join(unknown)}; expected some of {', '.join({**ours, **foreign})}"
        )
    print(f"{contest.machine()}, {jax.default_backend()}; {versions}")
    if missing:
        print(f"not installed: {', '.join(missing)} (pip install {' '.join(missing)})")
    results = {
        name: _timed(name, call, options.quick)
        for name, call in {**ours, **foreign}.items()
        if name in only or not only
    }
    print(f"\n{models_table(results) if options.models else table(results)}\n")
    faults = []
    for kind in ("broken", "worded otherwise"):
        lines = [
            f"  {name}, {case.promise}, {case.case}{case.outcome.removeprefix(kind)}"
            for name in ours
            for case in results.get(name, ())
            if case.kind == kind
        ]
        print("\n".join([f"{kind}, ours:", *lines]) if lines else f"{kind}, ours: none")
        faults += lines
    if options.json:
        rows = {name: [f._asdict() for f in lines] for name, lines in results.items()}
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if faults else 0


def _ours() -> dict[str, Callable]:
    """Returns the suite on ``attend`` and on each backend, by column."""
    names = {"xa": None, **{f"xa:{name}": name for name in backends.names()}}
    return {
        column: partial(testing.conformance, partial(xa.attend, backend=name))
        for column, name in names.items()
    }


def _held(make: Callable[[], models.Model], quick: bool) -> list[testing.Finding]:
    """Holds a model to all promises, of which none is quicker than others."""
    del quick
    return models.conformance(make(), refusals=REFUSALS)


def _asked(name: str, attend: Callable) -> Callable:
    """Returns the suite on another library's function, without the promises that do not apply."""
    left_out = NOT_ASKED | (NOT_ASKED_OF_TORCH if name == "torch" else set())
    promises = [promise for promise in testing.PROMISES if promise not in left_out]
    call = testing.with_arrays(attend)
    return partial(testing.conformance, call, promises=promises, refusals=REFUSALS)


def _timed(name: str, conformance: Callable, quick: bool) -> list[testing.Finding]:
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings = conformance(quick=quick)
    print(f"  {name}: {len(findings)} checks in {time.perf_counter() - start:.0f} s", flush=True)
    return findings


def table(results: Findings) -> str:
    """Formats the table of promises by libraries."""
    legend = "kept/taken; +refused calls; ~errors with other messages than promised; -: not asked"
    return "\n".join([*_aligned(_cells(results, testing.PROMISES)), "", legend])


def models_table(results: Findings) -> str:
    """Formats the table of models by promises."""
    legend = "kept/taken; -not offered by the adapter; blank: there is nothing to promise"
    rows = zip(*_cells(results, models.PROMISES), strict=True)
    return "\n".join([*_aligned([list(row) for row in rows]), "", legend])


def _cells(results: Findings, promises: Iterable[str]) -> list[list[str]]:
    """Makes a row for each promise, and one of the names before them."""
    counts = collections.defaultdict(collections.Counter)
    for name, findings in results.items():
        for finding in findings:
            counts[name, finding.promise][finding.kind] += 1
    cells = [[p, *(_cell(counts[name, p]) for name in results)] for p in promises]
    return [["", *results], *cells]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _cell(count: collections.Counter) -> str:
    if not count:
        return "-"
    signs = {"refused": "+", "worded otherwise": "~", "not offered": "-"}
    more = [f"{sign}{count[kind]}" for kind, sign in signs.items() if count[kind]]
    taken = count["kept"] + count["broken"]
    if not taken and not {*count} - {"not offered", "not applicable"}:
        return " ".join(more)
    return " ".join([f"{count['kept']}/{taken}", *more])


def _versions(others) -> str:
    names = ["jax", *sorted({name.split(".")[0] for name in others} - {"jax"})]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


if __name__ == "__main__":
    launch.script(main)
