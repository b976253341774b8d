"""Look for what breaks a promise.

    python -m experiments.fuzz                                     # all parts, another seed each time
    python -m experiments.fuzz --only=masks --seed=17 --cases=1    # one finding again

Each finding is printed with the command that shows it again; the table at the end says how many cases
each part tried. Exit code 1 with findings, 0 without.
"""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from experiments.fuzz import PARTS
from experiments.options import Options

_GRACE = 45  # seconds that a part may take beyond its time, to end the case that it is in


@dataclass
class Report:
    """What came of a part.

    Attributes:
      cases: how many were tried.
      findings: what is wrong -> the numbers of the cases that show it.
      skipped: why it was not tried.
    """

    part: str
    cases: int = 0
    seconds: float = 0.0
    findings: dict[str, list[int]] = field(default_factory=dict)
    skipped: str = ""

    def add(self, said: str, case: int) -> None:
        """A finding; the first of its kind is printed at once."""
        if said not in self.findings:
            print(f"{self.part}: {said}\n  {command(self.part, case)}", flush=True)
        self.findings.setdefault(said, []).append(case)


def command(part: str, case: int) -> str:
    """What shows a case again."""
    return f"python -m experiments.fuzz --only={part} --seed={case} --cases=1"


def main() -> int:
    """The command."""
    parser = Options(__doc__)
    parser.add_argument("--seed", type=int, help="number of the first case; by default, the time")
    parser.add_argument("--minutes", type=float, default=9.0, help="of all parts together")
    parser.add_argument("--cases", type=int, default=10**6, help="the most cases of a part")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    given = parser.parse_args()
    seed = int(time.time()) if given.seed is None else given.seed
    parts = [name for name in given.only.split(",") if name]
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"--only has {unknown[0]}; expected some of {', '.join(PARTS)}")
    for name in parts:  # before there are threads, in two of which jax cannot be imported at once
        importlib.import_module(f"experiments.fuzz.{name}")
    print(f"first case {seed}, {given.minutes:g} minutes", flush=True)
    at_once = min(len(parts), max(1, (os.cpu_count() or 1)), 2)
    seconds = 60 * given.minutes * at_once / len(parts)
    with ThreadPoolExecutor(at_once) as pool:
        reports = list(pool.map(lambda name: try_part(name, seed, seconds, given.cases), parts))
    print(table(reports), flush=True)
    return int(any(report.findings for report in reports))


def try_part(name: str, seed: int, seconds: float, cases: int) -> Report:
    """A part in a process of its own, which may hang, crash or run out of memory."""
    report, begun = Report(name), time.monotonic()
    part = sys.modules[f"experiments.fuzz.{name}"]
    missing = [module for module in part.NEEDS if importlib.util.find_spec(module) is None]
    if missing:
        report.skipped = f"{', '.join(missing)} not installed"
        return report
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-") as folder:
        call = [sys.executable, "-m", "experiments.fuzz.process", name, folder]
        process = subprocess.Popen(
            [*call, str(seed), str(seconds), str(cases)],
            env=os.environ | part.ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(seconds + _GRACE)
            ended = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = None
        last = _read(report, Path(folder) / "log.jsonl")
    if last is not None:
        how = "takes longer than it may" if ended is None else _end(ended)
        report.add(f"the process {how}", last)
    report.seconds = time.monotonic() - begun
    return report


def _read(report: Report, path: Path) -> int | None:
    """What a part's process wrote down; the case that it did not come back from."""
    if not path.exists():
        return -1
    last: int | None = -1
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if line["event"] == "case":
            report.cases, last = report.cases + 1, line["case"]
        elif line["event"] == "finding":
            report.add(line["said"], line["case"])
        else:
            last = None
    return last


def _end(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def table(reports: list[Report]) -> str:
    """How many cases each part tried, and how many of them are findings."""
    rows: list[tuple[str, ...]] = [("part", "cases", "findings", "of kinds", "seconds")]
    for report in reports:
        numbers = (
            str(report.cases),
            str(sum(map(len, report.findings.values()))),
            str(len(report.findings)),
            f"{report.seconds:.0f}",
        )
        rows.append((report.part, *numbers) if not report.skipped else (report.part, *"----"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, *(f"{r.part} is skipped: {r.skipped}" for r in reports if r.skipped)])


if __name__ == "__main__":
    sys.exit(main())
