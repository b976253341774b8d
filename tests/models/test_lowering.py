"""Every model trains and generates on accelerators: its programs lower for them, and attention is fused."""

import json

import pytest

from tests.conftest import on_eight_devices
from tests.models.every_model import NAMES


@pytest.mark.slow
def test_training_and_generation_lower_for_one_gpu_eight_gpus_and_tpus_with_fused_attention():
    said = on_eight_devices("-m", "tests.models.lowered", *NAMES)
    found = json.loads(said.splitlines()[-1])
    assert len(found) >= 2 * len(NAMES)
    assert not {name: said for name, said in found.items() if said}
