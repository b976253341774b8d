"""Decoding over eight devices, parameters and rows split, is decoding on one."""

import json

import pytest

from tests.conftest import on_eight_devices


@pytest.fixture(scope="module")
def found():
    return json.loads(on_eight_devices("-m", "tests.decode.eight_devices").splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["greedy", "contrastive", "beams", "sample", "speculative", "text"]
)
def test_eight_devices_decode_what_one_decodes(found, name):
    assert found[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["beams", "text", "gradients"])
def test_explicit_mesh_axes_change_nothing(found, name):
    assert found[f"{name} on explicit axes"] == ""
