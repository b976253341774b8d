"""The parity table: small random models of every family, here and in ``transformers``.

    python -m experiments.parity [--only=WORD]

Errors are the largest differences, relative to the largest value. Exits with 1 if a row differs. Needs torch
and transformers: pip install 'crossattn[bench]'.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.parity import ours, reference
from experiments.parity.cases import CASES, Case

TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-3


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def compare(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """For each thing measured, its error; of tokens, the share of rows that differ."""
    if found.keys() != expected.keys():
        raise ValueError(f"measured {sorted(found)} here, {sorted(expected)} there.")
    errors = {}
    for name, array in expected.items():
        if array.shape != found[name].shape:
            raise ValueError(f"{name} is {found[name].shape} here, {array.shape} there.")
        if name in ("greedy", "beams"):
            errors[name] = float(np.mean(np.any(found[name] != array, axis=-1)))
        else:
            errors[name] = relative_error(found[name], array)
    return errors


def differences(errors: Mapping[str, float]) -> list[str]:
    """What is further off than rounding explains."""
    limits = {"greedy": 0.0, "beams": 0.0}
    return [
        f"{name}: {error:.2g}"
        for name, error in errors.items()
        if not error
        <= limits.get(name, GRADIENT_TOLERANCE if name.startswith("gradient") else TOLERANCE)
    ]


def run(case: Case, folder: Path) -> dict[str, float]:
    """Both sides of a case, and what is between them."""
    model = reference.build(case, folder)
    expected = reference.measure(case, model, folder)
    names = [name.removeprefix("gradient of ") for name in expected if "gradient" in name]
    return compare(ours.measure(case, folder, names), expected)


def row(case: Case, errors: Mapping[str, float]) -> str:
    """One line of the table."""

    def shown(*names: str) -> str:
        values = [value for name, value in errors.items() if name.startswith(names)]
        return f"{max(values):.1e}" if values else "-"

    def equal(name: str) -> str:
        return f"{1 - errors[name]:.0%}" if name in errors else "-"

    cells = [shown("logits"), shown("weights"), shown("loss"), shown("gradient")]
    return f"| {case.name} | {' | '.join([*cells, equal('greedy'), equal('beams')])} |"


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has it")
    options = parser.parse_args(arguments)
    print("| model, options | logits | weights | loss | gradients | greedy | beam 4 |")
    print("|---|---|---|---|---|---|---|")
    wrong = []
    for case in CASES:
        if options.only.lower() not in case.name.lower():
            continue
        with tempfile.TemporaryDirectory() as folder:
            errors = run(case, Path(folder))
        print(row(case, errors), flush=True)
        wrong += [f"{case.name}: {text}" for text in differences(errors)]
    print("\n".join(["", "different:", *wrong]) if wrong else "\ndifferent: none")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
