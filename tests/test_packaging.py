"""The wheel holds all of the library and nothing else; the doctor knows the extras."""

import shutil
import subprocess
import sys
import tomllib
import zipfile

from crossattn import __main__ as program
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def test_the_wheel_holds_every_file_of_the_library_and_no_other(tmp_path):
    """Native sources and the mark of types among them."""
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "crossattn", source / "crossattn", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    asked = [sys.executable, "-W", "ignore", "-c", _BUILD, str(tmp_path)]
    subprocess.run(asked, cwd=source, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {p.relative_to(source).as_posix() for p in source.glob("crossattn/**/*") if p.is_file()}
    assert {name for name in held if ".dist-info/" not in name} == files
    assert {"crossattn/py.typed", "crossattn/ops/native/attention.cc"} <= held


def test_the_doctor_says_what_each_extra_is_for():
    assert program.EXTRAS.keys() == PROJECT["optional-dependencies"].keys()


def test_the_doctor_names_what_an_extra_lacks():
    requirements = [
        "numpy>=1; extra == 'here'",
        "no_such_thing>=3; extra == 'gone'",
        'crossattn[gone,here]; extra == "both"',
    ]
    assert program._lacking("here", requirements) == []
    assert program._lacking("gone", requirements) == ["no_such_thing>=3"]
    assert program._lacking("both", requirements) == ["no_such_thing>=3"]
