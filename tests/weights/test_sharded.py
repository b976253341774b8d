"""A checkpoint read onto several devices holds what it holds on one."""

import subprocess
import sys

from tests.conftest import with_devices
from tests.weights import checkpoints


def test_each_device_gets_its_part_of_each_tensor(tmp_path):
    folder = checkpoints.fresh(checkpoints.BART, tmp_path / "bart")
    done = subprocess.run(
        [sys.executable, "-m", "tests.weights.eight_devices", str(folder)],
        env=with_devices(8),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
