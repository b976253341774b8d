"""Promises kept by each backend here and by other libraries, by the suite ``crossattn.testing``.

    python -m experiments.bench.conformance [--quick] [--only=NAME,..] [--json=FILE]

Exits with 1 if a backend of this library breaks a promise, error messages included.
"""

import collections
import importlib.metadata
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax

import crossattn as xa
from crossattn import testing
from crossattn.ops import backends
from experiments.bench import contest, contestants
from experiments.options import Options

REFUSALS = (Exception,)  # another library that raises has given no wrong answer
NOT_ASKED = {"errors"}  # each library has its own messages
NOT_ASKED_OF_TORCH = {"composition", "meshes"}  # they would test the callback from JAX

Findings = dict[str, list[testing.Finding]]


def main(arguments: list[str] | None = None) -> int:
    """Runs, prints, and returns the exit code."""
    parser = Options(__doc__)
    parser.add_argument("--quick", action="store_true", help="one case of each kind")
    parser.add_argument("--only", default="", metavar="NAME,..", help="some of the columns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there")
    options = parser.parse_args(arguments)
    only = set(filter(None, options.only.split(",")))
    others, missing = contestants.installed()
    ours, foreign = _ours(), {name: _asked(name, call) for name, call in others.items()}
    unknown = only - ours.keys() - foreign.keys()
    if unknown:
        parser.error(
            f"--only={','.join(unknown)}; expected some of {', '.join({**ours, **foreign})}"
        )
    print(f"{contest.machine()}, {jax.default_backend()}; {_versions(others)}")
    if missing:
        print(f"not installed: {', '.join(missing)} (pip install {' '.join(missing)})")
    results = {
        name: _timed(name, call, options.quick)
        for name, call in {**ours, **foreign}.items()
        if name in only or not only
    }
    print(f"\n{table(results)}\n")
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
    counts = collections.defaultdict(collections.Counter)
    for name, findings in results.items():
        for finding in findings:
            counts[name, finding.promise][finding.kind] += 1
    rows = [["", *results]]
    for promise in testing.PROMISES:
        rows.append([promise, *(_cell(counts[name, promise]) for name in results)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    legend = "kept/taken; +refused calls; ~errors with other messages than promised; -: not asked"
    return "\n".join([*lines, "", legend])


def _cell(count: collections.Counter) -> str:
    if not count:
        return "-"
    refused = f" +{count['refused']}" if count["refused"] else ""
    worded = f" ~{count['worded otherwise']}" if count["worded otherwise"] else ""
    return f"{count['kept']}/{count['kept'] + count['broken']}{refused}{worded}"


def _versions(others) -> str:
    names = ["jax", *sorted({name.split(".")[0] for name in others} - {"jax"})]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
