"""Eight devices, in a process of their own, compute what one does, and send gradients of loops once."""

import json

import pytest

from tests.conftest import on_eight_devices


@pytest.fixture(scope="module")
def faults():
    return json.loads(on_eight_devices("-m", "tests.train.on_eight").splitlines()[-1])


@pytest.mark.slow  # test_sharding has losses of eight devices
@pytest.mark.parametrize(
    "case",
    ["loss on all axes", "loss along seq", "accumulated", "repeated", "adafactor", "offloaded"],
)
def test_eight_devices_compute_what_one_does_and_send_gradients_once(faults, case):
    assert not faults[case], faults[case]
