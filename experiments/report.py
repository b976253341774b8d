"""Results of launchers, as tables and as JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from crossattn.train import processes
from crossattn.train.storage import Folder, write_whole

_LISTS = ("samples", "examples", "chunks")  # which are in the file alone


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


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as a Markdown table, the first one its head, columns aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
