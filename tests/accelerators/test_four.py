"""Every model and every config, found by their names, compile for four v5e by the compiler for them."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT, as_users_have_it


@pytest.mark.parametrize("kind", ["models", "configs"])
def test_they_compile_for_four_v5e(kind):
    compile_for_v5e("tests.accelerators.four", kind)


def compile_for_v5e(*program):
    """A program that prints what is wrong with each of what it compiles finds nothing."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("no compiler for v5e: pip install 'crossattn[plan-tpu]'")
    run = subprocess.run(
        [sys.executable, "-m", *program],
        cwd=ROOT,
        env=as_users_have_it(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found and not {name: said for name, said in found.items() if said}
