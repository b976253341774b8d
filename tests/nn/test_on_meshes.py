"""Gradients on a mesh are those of one device, whatever stands between the parts."""

import json

import pytest

from tests.conftest import on_eight_devices

pytestmark = pytest.mark.slow  # tests/models holds two models to one device


@pytest.fixture(scope="module")
def found():
    return json.loads(on_eight_devices("-m", "tests.nn.eight_devices").splitlines()[-1])


def test_ten_random_stacks_have_the_gradients_of_one_device_on_five_meshes(found):
    assert len(found["stacks"]) == 50
    assert {case: fault for case, fault in found["stacks"].items() if fault} == {}


@pytest.mark.xfail(strict=True, reason="XLA's partitioner; mended, placed() is for speed alone")
@pytest.mark.parametrize("mistake", ["chain", "sum"])
def test_xla_gives_on_a_mesh_what_it_gives_on_one_device(found, mistake):
    assert found[mistake]
