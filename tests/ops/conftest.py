"""Tests of kernels see one device, as the compiled one asks; meshes are made of all eight."""

import pytest

from crossattn.ops.blockwise import blocks
from tests.conftest import one_device


@pytest.fixture(scope="module", autouse=True)
def _on_one_device():
    with one_device():
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 queries by 3 keys, which divide neither of the lengths."""
    plan = blocks.Plan
    monkeypatch.setattr(blocks, "plan", lambda T, S, *_: plan(T, S, min(4, T), min(3, S)))
