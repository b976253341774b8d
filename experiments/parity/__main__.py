"""Compares small random models of every family with ``transformers``, and prints the parity table.

    python -m experiments.parity [--only=WORD] [--draws=N] [--seed=N] [--page=docs/pretrained.md]

Errors are the largest differences, relative to the largest value; the columns of searches count the texts
that are the same, and those that end before the limit. Chosen models come first, then random ones of every
family. --page writes the table into a page, with one row for all random models of a family. Exits with 1 if a
row differs. Needs torch and transformers: pip install 'crossattn[bench]'.
"""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments import launch
from experiments.options import Options
from experiments.parity import ours, reference
from experiments.parity.cases import CASES, SEARCHED, Case, ended
from experiments.parity.draws import random_cases

SEARCHES: tuple[str, ...] = ("greedy", "beams")
HEAD = (
    "| model, options | logits | weights | loss | gradients | greedy | beam 4 |\n"
    "|---|---|---|---|---|---|---|"
)
TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference over the largest value."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def compare(
    actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns the error of each measurement; of tokens, the share of rows that differ."""
    if actual.keys() != expected.keys():
        raise ValueError(f"measured {sorted(actual)} here, {sorted(expected)} there.")
    errors = {}
    for name, array in expected.items():
        if array.shape != actual[name].shape:
            raise ValueError(f"{name} is {actual[name].shape} here, {array.shape} there.")
        if name in SEARCHES:
            errors[name] = float(np.mean(np.any(actual[name] != array, axis=-1)))
        else:
            errors[name] = relative_error(actual[name], array)
    return errors


def differences(errors: Mapping[str, float]) -> list[str]:
    """Returns the errors that are larger than rounding explains."""

    def limit(name: str) -> float:
        gradient = name.startswith("gradient")
        return 0.0 if name in SEARCHES else GRADIENT_TOLERANCE if gradient else TOLERANCE

    return [f"{name}: {x:.2g}" for name, x in errors.items() if not x <= limit(name)]


def run(case: Case, folder: Path) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Returns the errors of a case, and the results of ``transformers``."""
    model = reference.build(case, folder)
    expected = reference.measure(case, model, folder)
    return compare(ours.measure(case, folder, ours.gradients_of(expected)), expected), expected


def row(name: str, errors: Mapping[str, float], ends: Mapping[str, int]) -> str:
    """Returns a line of the table; ``ends`` counts the texts of each search that end before the limit."""

    def shown(*names: str) -> str:
        values = [value for name, value in errors.items() if name.startswith(names)]
        return f"{max(values):.1e}" if values else "-"

    def equal(name: str) -> str:
        return f"{1 - errors[name]:.0%}, {ends[name]} of {SEARCHED} end" if name in errors else "-"

    outputs = ("logits", "frames", "vectors", "pooled", "next sentence")
    cells = [shown(*outputs), shown("weights"), shown("loss"), shown("gradient")]
    return f"| {name} | {' | '.join([*cells, *map(equal, SEARCHES)])} |"


def title(case: Case) -> str:
    """Returns the name of a case's row in a page, which random models of a family share."""
    family, random, _ = case.name.partition(", random")
    return f"{family}, random" if random else case.name


def rows_of(page: str) -> dict[str, str]:
    """Returns the rows of a page's table by their names."""
    lines = page.partition(f"{HEAD}\n")[2].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("| "), lines)
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows}


def with_rows(page: str, rows: Sequence[str]) -> str:
    """Returns the page with these rows instead of its own."""
    before, _, after = page.partition(f"{HEAD}\n")
    rest = after.removeprefix("".join(f"{line}\n" for line in rows_of(page).values()))
    return "\n".join([before + HEAD, *rows, rest])


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns 1 if a case differs."""
    parser = Options(__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    parser.add_argument("--draws", default=2, type=int, metavar="N", help="random models a family")
    parser.add_argument("--seed", default=0, type=int, metavar="N", help="of the random models")
    parser.add_argument("--page", metavar="FILE", help="a page whose table is written again")
    options = parser.parse_args(arguments)
    if options.page and options.only:
        parser.error("--page writes the whole table; expected no --only beside it")
    parser.needs("torch", "transformers", install="crossattn[bench]")
    print(HEAD)
    wrong: list[str] = []
    found: dict[str, dict[str, float]] = {}
    ends: dict[str, dict[str, int]] = {}
    for case in (*CASES, *random_cases(options.seed, options.draws)):
        if options.only.lower() not in case.name.lower():
            continue
        with tempfile.TemporaryDirectory() as folder:
            errors, expected = run(case, Path(folder))
        own = ends[title(case)] = {
            name: ended(expected[name]).sum() for name in SEARCHES if name in expected
        }
        print(row(case.name, errors, own), flush=True)
        largest = found.setdefault(title(case), {})
        largest |= {name: max(error, largest.get(name, 0)) for name, error in errors.items()}
        wrong += [f"{case.name}: {text} of {case.config}" for text in differences(errors)]
    if options.page:
        rows = [row(name, errors, ends[name]) for name, errors in found.items()]
        page = Path(options.page)
        page.write_text(with_rows(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print("\n".join(["", "different:", *wrong]) if wrong else "\ndifferent: none")
    return 1 if wrong else 0


if __name__ == "__main__":
    launch.script(main)
