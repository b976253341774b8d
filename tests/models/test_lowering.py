"""Every model trains and generates on accelerators: its programs lower for them, and attention is fused."""

import json

import pytest

from tests.conftest import on_eight_devices
from tests.models.every_model import NAMES


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(NAMES[::8], id="every eighth model"),
        pytest.param(NAMES, id="every model", marks=pytest.mark.slow),
    ],
)
def test_training_and_generation_lower_for_one_gpu_eight_gpus_and_tpus_with_fused_attention(names):
    said = on_eight_devices("-m", "tests.models.lowered", *names)
    found = json.loads(said.splitlines()[-1])
    assert len(found) >= 2 * len(names)
    assert not {name: said for name, said in found.items() if said}
