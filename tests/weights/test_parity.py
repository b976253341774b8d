"""A loaded model computes what ``transformers`` computes: live where that is here, else as it once did."""

import dataclasses
import importlib.util

import numpy as np
import pytest

from experiments.parity import golden, ours, reference
from experiments.parity.__main__ import compare, differences
from experiments.parity.cases import CASES
from tests.weights.golden.make import PATH

# Compiling a search takes most of the time: one of each kind here, all of them in `experiments.parity`.
SEARCHED = ("T5, tied, relu", "Marian, scaled, swish", "GPT-2", "Whisper")
LIVE = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
MOST_BYTES = 1_000_000


def named(cases):
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.fixture(scope="module")
def kept():
    return golden.read(PATH)


def measured(case, folder, expected):
    names = [name.removeprefix("gradient of ") for name in expected if "gradient" in name]
    return ours.measure(case, folder, names)


@pytest.mark.parametrize("case", named(CASES))
def test_a_loaded_model_computes_what_transformers_computes(case, kept, tmp_path):
    """Logits, every layer's cross-attention, loss, three gradients; greedy and beam tokens."""
    case = dataclasses.replace(case, search=case.search and case.name.startswith(SEARCHED))
    if LIVE:
        expected = reference.measure(case, reference.build(case, tmp_path), tmp_path)
    else:
        expected = golden.rebuild(kept[case.name], tmp_path)
        skipped = () if case.search else ("greedy", "beams")
        expected = {name: array for name, array in expected.items() if name not in skipped}
    errors = compare(measured(case, tmp_path, expected), expected)
    assert differences(errors) == []


def test_golden_files_are_small_and_hold_every_case(kept):
    assert PATH.stat().st_size < MOST_BYTES
    assert kept.keys() == {case.name for case in CASES}


@pytest.mark.skipif(not LIVE, reason="torch and transformers are not installed")
@pytest.mark.parametrize("case", named(case for case in CASES if "MBart, untied" in case.name))
def test_golden_files_hold_what_transformers_computes(case, kept, tmp_path):
    expected = reference.measure(case, reference.build(case, tmp_path / "live"), tmp_path / "live")
    found = golden.rebuild(kept[case.name], tmp_path / "golden")
    assert differences(compare(found, expected)) == []
    for name in ("config.json", "model.safetensors"):
        live, kept_file = (tmp_path / side / name for side in ("live", "golden"))
        assert live.read_bytes() == kept_file.read_bytes()


def test_a_difference_is_found():
    right = {"logits": np.ones((2, 3)), "greedy": np.ones((2, 3), int), "gradient of w": np.ones(3)}
    wrong = {"logits": np.ones((2, 3)) * 1.001, "greedy": np.eye(2, 3, dtype=int)}
    wrong["gradient of w"] = np.ones(3) * np.nan
    assert differences(compare(right, right)) == []
    assert [text.split(":")[0] for text in differences(compare(wrong, right))] == list(right)
