"""Pages of LibreOffice's help in English: the paragraphs of `libreoffice_help/en-fr`, a page a document.

A paragraph that several pages share stands in the first of them alone. Splits are those of that source.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from crossattn.data.sources import Example, items_of, libreoffice_help

FORM = "help_documents"


def open_split(rest: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns {"id": file, "paragraphs": texts} of each page, in the order of their names."""
    pairs = libreoffice_help.open_split("en-fr", split, data_dir=data_dir)
    rows = items_of(pairs, range(len(pairs)))
    return pages(rows)


def pages(rows: Sequence[Example]) -> list[Example]:
    """Returns the pages of paragraphs, whose ids are FILE#PARAGRAPH; their order within a page stays."""
    file = lambda row: row["id"].partition("#")[0]  # noqa: E731
    grouped = itertools.groupby(sorted(rows, key=file), key=file)
    return [{"id": name, "paragraphs": [row["source"] for row in own]} for name, own in grouped]
