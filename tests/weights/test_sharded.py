"""A checkpoint read onto several devices holds what it holds on one."""

from tests.conftest import on_eight_devices
from tests.weights import checkpoints


def test_each_device_gets_its_part_of_each_tensor(tmp_path):
    folder = checkpoints.fresh(checkpoints.BART, tmp_path / "bart")
    assert on_eight_devices("-m", "tests.weights.eight_devices", str(folder)) == "equal\n"
