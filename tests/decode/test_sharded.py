"""Decoding over eight devices, parameters and rows split, is decoding on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def on_eight_devices():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.decode.eight_devices"],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["beams", "sample", "speculative"])
def test_eight_devices_decode_what_one_decodes(on_eight_devices, name):
    assert on_eight_devices[name] == ""
