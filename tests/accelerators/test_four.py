"""Every model, config and kind of attention compiles for four v5e by the compiler for them."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.accelerators.test_sixteen import ONE_PROCESS
from tests.conftest import ROOT, as_users_have_it

pytestmark = ONE_PROCESS["v5e"]


@pytest.mark.parametrize("kind", ["models", "configs", "attention"])
def test_they_compile_for_four_v5e(kind):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("no compiler for v5e: pip install 'crossattn[plan-tpu]'")
    run = subprocess.run(
        [sys.executable, "-m", "tests.accelerators.four", kind],
        cwd=ROOT,
        env=as_users_have_it(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found and not {name: said for name, said in found.items() if said}
