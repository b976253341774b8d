"""A run as plain records: its settings, its log and its results, without a device or a checkpoint.

``pandas.DataFrame(read_run(workdir).metrics)`` is a table of the log.
"""

import json
from dataclasses import dataclass
from typing import Any

from crossattn.train import storage
from crossattn.train.errors import TrainError
from crossattn.train.storage import Folder


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
      workdir: its work directory.
      settings: the config that made it, values by dotted key.
      metrics: lines of its log, each with "step" and "kind" ("train" or "eval"); a number that was not
        finite is None.
      results: of each split that was evaluated, what ``experiments.evaluate`` wrote.
    """

    workdir: Folder
    settings: dict[str, Any]
    metrics: list[dict[str, Any]]
    results: dict[str, dict[str, Any]]

    def curve(self, kind: str, metric: str) -> tuple[list[int], list[float]]:
        """Returns steps and values of a metric in the log, those that are finite."""
        lines = [
            line for line in self.metrics if line["kind"] == kind and line.get(metric) is not None
        ]
        return [line["step"] for line in lines], [line[metric] for line in lines]

    def members(self, metric: str) -> list[str]:
        """Returns the names of members that have the metric in the log, in order."""
        ends = f"/{metric}"
        return list(
            dict.fromkeys(
                name.removesuffix(ends)
                for line in self.metrics
                for name in line
                if name.endswith(ends)
            )
        )


def read_run(workdir: str | Folder) -> RunRecord:
    """Reads a run's settings, log and results.

    Raises:
      TrainError: the folder has no run, or a file of it is damaged.
    """
    workdir = storage.absolute(workdir)
    settings = _json(workdir / "config.json")
    log = workdir / "metrics.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    metrics = []
    for number, line in enumerate(lines, 1):
        try:
            metrics.append(json.loads(line))
        except ValueError:
            if number < len(lines):  # the last was being written
                raise TrainError(f"line {number} of {log} is no JSON; remove it") from None
    found = sorted(path for path in storage.children(workdir) if path.name.startswith("results-"))
    results = {
        path.stem.removeprefix("results-"): _json(path) for path in found if path.suffix == ".json"
    }
    return RunRecord(workdir, settings, metrics, results)


def _json(path: Folder) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise TrainError(f"there is no run in {path.parent}: {path.name} is not there") from None
    except ValueError:
        raise TrainError(f"{path} is damaged: it is no JSON") from None
