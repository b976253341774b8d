"""What ``attend`` lowers to on a TPU, its compiler takes: masks, biases, dtypes, head sizes, lengths."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT, as_users_have_it


def test_every_kind_of_attention_compiles_for_v5e_as_fused_kernels():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("no compiler for v5e: pip install 'crossattn[plan-tpu]'")
    run = subprocess.run(
        [sys.executable, "-m", "tests.accelerators.attention"],
        cwd=ROOT,
        env=as_users_have_it(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found and not {name: said for name, said in found.items() if said}
