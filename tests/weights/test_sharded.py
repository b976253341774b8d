"""A checkpoint read onto several devices holds what it holds on one."""

import os
import subprocess
import sys
from pathlib import Path

from tests.weights import checkpoints

ROOT = Path(__file__).parents[2]


def test_each_device_gets_its_part_of_each_tensor(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT)}
    folder = checkpoints.fresh(checkpoints.BART, tmp_path / "bart")
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.eight_devices", str(folder)],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
