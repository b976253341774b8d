"""The table of architectures on the page of the design: its rows are programs, of parts that exist."""

import importlib
import re

import pytest

import crossattn as xa
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "design.md").read_text()
TABLE = PAGE.partition("## Architectures in these parts")[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.splitlines()
    if line.startswith("| ") and not line.startswith("| architecture")
]
HERE = ROOT / "tests" / "extending"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_has_a_program_and_its_parts_are_used(row):
    *cells, written = row
    names = re.findall(r"`([\w./]+)`", written)
    assert len(row) == 5
    assert any(name.startswith("tests/extending/") for name in names), "no program"
    text = ""
    for name in names:
        path = ROOT / name if "/" in name else ROOT / "crossattn" / "models" / f"{name}.py"
        text += path.read_text()
        if "/" not in name:
            assert importlib.import_module(f"crossattn.models.{name}").tiny()
    for part in re.findall(r"`([A-Z]\w+)", " ".join(cells[1:])):
        assert hasattr(xa.nn, part) or hasattr(xa.models, part), part
        assert re.search(rf"\b{part}", text), f"{part} is in none of {names}"


def test_every_program_is_in_a_row():
    named = set(re.findall(r"`tests/extending/([\w.]+)`", TABLE))
    programs = {path.name for path in HERE.glob("*.py")}
    programs -= {name for name in programs if name.startswith(("__", "test_", "conftest"))}
    assert programs <= named
    for program in programs:  # and a test runs it
        imports = f"from .{program.removesuffix('.py')} import"
        assert any(imports in path.read_text() for path in HERE.glob("test_*.py")), program
        assert "crossattn.models" not in (HERE / program).read_text(), program  # of parts alone
