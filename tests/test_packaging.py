"""The wheel holds all of the library and nothing else; the doctor knows the extras."""

import shutil
import subprocess
import sys
import tomllib
import zipfile

from crossattn import __main__ as program
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def built(kind, folder):
    """The wheel of a copy of the project, "wheel" or "editable", and that copy."""
    source = folder / "source"
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "crossattn", source / "crossattn", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    call = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    asked = [sys.executable, "-W", "ignore", "-c", call]
    subprocess.run(asked, cwd=source, check=True, capture_output=True, timeout=60)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel), source


def test_the_wheel_holds_every_file_of_the_library_and_no_other(tmp_path):
    """Native sources and the mark of types among them."""
    wheel, source = built("wheel", tmp_path)
    held = set(wheel.namelist())
    files = {p.relative_to(source).as_posix() for p in source.glob("crossattn/**/*") if p.is_file()}
    assert {name for name in held if ".dist-info/" not in name} == files
    assert {"crossattn/py.typed", "crossattn/ops/native/attention.cc"} <= held


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path):
    wheel, source = built("editable", tmp_path)
    (name,) = (name for name in wheel.namelist() if ".dist-info/" not in name)
    assert name.endswith(".pth") and wheel.read(name).decode().split() == [str(source)]


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
