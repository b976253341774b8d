"""A loaded model computes what ``transformers`` computes: by golden files, which are themselves compared with
it where it is installed; random models are compared there, too."""

import importlib.util
import json

import numpy as np
import pytest

from experiments.parity import __main__ as parity
from experiments.parity import golden, ours, reference
from experiments.parity.__main__ import (
    GRADIENT_TOLERANCE,
    SEARCHES,
    TOLERANCE,
    compare,
    differences,
)
from experiments.parity.cases import CASES, EOS, SEARCHED, ended
from experiments.parity.draws import random_cases
from tests.conftest import ROOT
from tests.weights.checkpoints import each
from tests.weights.golden.make import PATH

MOST_BYTES = 1_000_000
live = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "transformers")),
    reason="compares with transformers itself: pip install 'crossattn[bench]'",
)


@pytest.fixture(scope="module")
def kept():
    return golden.read(PATH)


def timeless(settings):
    """Returns the settings without the version that wrote them."""
    return {key: value for key, value in settings.items() if key != "transformers_version"}


def check(case, folder, expected):
    found = ours.measure(case, folder, ours.gradients_of(expected))
    assert differences(compare(found, expected)) == [], case.config


@pytest.mark.quick(1)
@each(CASES, every=4)
def test_a_loaded_model_computes_what_transformers_computes(case, kept, tmp_path):
    """Compares logits, all cross-attention, loss, three gradients, greedy and beam tokens."""
    check(case, tmp_path, golden.rebuild(kept[case.name], tmp_path))


@live
@each(random_cases(seed=1, count=1)[::4])
def test_a_random_model_computes_what_transformers_computes(case, tmp_path):
    model = reference.build(case, tmp_path)
    check(case, tmp_path, reference.measure(case, model, tmp_path))


@live
@each(CASES, every=6)
def test_golden_files_hold_what_transformers_computes(case, kept, tmp_path):
    expected = reference.measure(case, reference.build(case, tmp_path / "live"), tmp_path / "live")
    found = golden.rebuild(kept[case.name], tmp_path / "golden")
    assert differences(compare(found, expected)) == []
    sides = tmp_path / "live", tmp_path / "golden"
    configs = [
        json.loads((side / "config.json").read_text(), object_hook=timeless) for side in sides
    ]
    assert configs[0] == configs[1]
    weights = [(side / "model.safetensors").read_bytes() for side in sides]
    assert weights[0] == weights[1]


def test_the_page_has_a_row_of_every_case_and_none_is_further_off_than_rounding():
    rows = parity.rows_of((ROOT / "docs" / "pretrained.md").read_text())
    assert list(rows) == list(dict.fromkeys(map(parity.title, (*CASES, *random_cases(0, 1)))))
    for name, line in rows.items():
        *errors, greedy, beams = line.strip(" |").split(" | ")[1:]
        limits = [TOLERANCE] * 3 + [GRADIENT_TOLERANCE]
        for error, limit in zip(errors, limits, strict=True):
            assert error == "-" or float(error) <= limit, name
        assert {greedy[:4], beams[:4]} in ({"100%"}, {"-"}), name


def test_a_run_writes_its_rows_into_a_page():
    lines = [parity.row(name, {"logits": 1e-6}, {}) for name in "abc"]
    page = "\n".join(["before", parity.HEAD, *lines[:2], "", "after", ""])
    changed = parity.with_rows(page, lines[1:])
    assert changed == page.replace(lines[0], lines[1], 1).replace(
        f"{lines[1]}\n{lines[1]}", f"{lines[1]}\n{lines[2]}"
    )
    assert list(parity.rows_of(changed)) == ["b", "c"]


def test_golden_files_are_small_and_hold_every_case(kept):
    assert PATH.stat().st_size < MOST_BYTES
    assert kept.keys() == {case.name for case in CASES}


@each([case for case in CASES if case.search])
@pytest.mark.parametrize("search", SEARCHES)
def test_generated_texts_differ_and_end_at_different_lengths(case, search, kept):
    """Checks that ends, length penalties and padding after the end affect the comparison."""
    tokens = kept[case.name][search]
    lengths = np.argmax(tokens == EOS, axis=1)[ended(tokens)]
    assert len(lengths) >= SEARCHED * 2 // 5
    assert len(np.unique(lengths)) >= 3
    assert len(np.unique(tokens, axis=0)) >= SEARCHED * 3 // 5


def test_random_models_are_those_of_their_seed_and_reach_every_alternative():
    few, many = random_cases(seed=0, count=1), random_cases(seed=0, count=2)
    assert few == many[::2] and len({case.name for case in many}) == len(many)
    assert all(
        one.config != other.config for one, other in zip(few, random_cases(1, 1), strict=True)
    )
    drawn = [case for case in random_cases(seed=0, count=40) if case.name.startswith("T5")]
    assert {case.config["feed_forward_proj"] for case in drawn} == {
        "relu", "gelu", "gelu_new", "silu", "gated-gelu", "gated-silu",
    }  # fmt: skip
    assert {case.untied for case in drawn} == {(), ("lm_head.weight",)}


def test_a_difference_is_found():
    right = {"logits": np.ones((2, 3)), "greedy": np.ones((2, 3), int), "gradient of w": np.ones(3)}
    wrong = {"logits": np.ones((2, 3)) * 1.001, "greedy": np.eye(2, 3, dtype=int)}
    wrong["gradient of w"] = np.ones(3) * np.nan
    assert differences(compare(right, right)) == []
    assert [text.split(":")[0] for text in differences(compare(wrong, right))] == list(right)
