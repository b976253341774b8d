"""Results of launchers, as tables, as a page and as JSON."""

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from crossattn.train import processes
from crossattn.train.storage import Folder, write_whole

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { border-bottom: 1px solid #8884; padding: .3rem .8rem; text-align: left; white-space: nowrap }
img { max-width: 100%; background: white } :root { color-scheme: light dark }"""
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


def page(title: str, tables: Mapping[str, Sequence[Sequence[str]]], figure: Any, drawn: str) -> str:
    """Returns one HTML page with tables, those that have more than a head, and a figure titled ``drawn``."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, facecolor="white")
    picture = base64.b64encode(file.getvalue()).decode()
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>",
    ]
    for heading, rows in tables.items():
        if len(rows) < 2:
            continue
        head, *body = (
            "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row)
            for row, kind in zip(rows, ["th"] + ["td"] * (len(rows) - 1), strict=True)
        )
        lines = "".join(f"<tr>{line}</tr>" for line in (head, *body))
        parts.append(f"<h2>{html.escape(heading)}</h2><table>{lines}</table>")
    named = html.escape(drawn)
    parts.append(
        f'<h2>{named}</h2><img alt="{named.lower()}" src="data:image/png;base64,{picture}">'
    )
    return "\n".join(parts) + "\n"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
