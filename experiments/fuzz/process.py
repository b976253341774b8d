"""The process of one part: case after case until the time is up, each written down before it begins.

python -m experiments.fuzz.process PART FOLDER FIRST SECONDS CASES
"""

import importlib
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.fuzz import Wrong


def main(name: str, folder: Path, first: int, seconds: float, cases: int) -> None:
    """Writes ``log.jsonl`` in the folder, whose last line is "end" unless the process died."""
    end = time.monotonic() + seconds
    part = importlib.import_module(f"experiments.fuzz.{name}")
    with (folder / "log.jsonl").open("w", encoding="utf-8") as log:

        def write(**line: Any) -> None:
            log.write(json.dumps(line) + "\n")
            log.flush()

        write(event="case", case=first)  # what goes wrong in `start` shows with any number
        case = part.start(folder)
        for number in range(first, first + cases):
            if number > first:
                if time.monotonic() > end:
                    break
                write(event="case", case=number)
            if said := fault(case, number):
                write(event="finding", case=number, said=said)
        write(event="end")


def fault(case: Callable[[np.random.Generator], Any], number: int) -> str:
    """What is wrong with a case; "" for nothing."""
    try:
        case(np.random.default_rng(number))
    except Wrong as wrong:
        return _short(str(wrong))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = _short(f"{type(error).__name__}: {error}")
        return f"{said} ({Path(place.filename).name}, {place.name})"
    return ""


def _short(text: str) -> str:
    """One line, without what differs from case to case: addresses and the scratch folder."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", " ".join(text.split()))
    return re.sub(r"\S*/fuzz-\w+-\w+/", ".../", text)[:400]


if __name__ == "__main__":
    _, name, folder, *numbers = sys.argv
    main(name, Path(folder), int(numbers[0]), float(numbers[1]), int(numbers[2]))
