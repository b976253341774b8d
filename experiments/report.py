"""Results of launchers, as a table and as JSON."""

import json
from collections.abc import Mapping
from typing import Any

from crossattn.train import processes
from crossattn.train.storage import Folder, write_whole

_LISTS = ("samples", "examples")  # which are in the file alone


def save(results: Mapping[str, Any], path: Folder) -> None:
    """Writes results as JSON, in the main process."""
    if processes.is_main():
        write_whole(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def show(results: Mapping[str, Any]) -> None:
    """Prints results in two columns, in the main process."""
    if not processes.is_main():
        return
    rows = [(name, _text(value)) for name, value in results.items() if name not in _LISTS]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"  {name:<{width}}  {text}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
