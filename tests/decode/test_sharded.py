"""Decoding over eight devices, parameters and rows split, is decoding on one."""

import json
import subprocess
import sys

import pytest

from tests.conftest import with_devices


@pytest.fixture(scope="module")
def on_eight_devices():
    done = subprocess.run(
        [sys.executable, "-m", "tests.decode.eight_devices"],
        env=with_devices(8),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name", ["greedy", "contrastive", "beams", "sample", "speculative", "text"]
)
def test_eight_devices_decode_what_one_decodes(on_eight_devices, name):
    assert on_eight_devices[name] == ""


@pytest.mark.parametrize("name", ["beams", "text", "gradients"])
def test_explicit_mesh_axes_change_nothing(on_eight_devices, name):
    assert on_eight_devices[f"{name} on explicit axes"] == ""
