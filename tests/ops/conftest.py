"""Tests of kernels see one device, as the compiled one asks; meshes are made of all eight."""

import pytest

from tests.conftest import one_device


@pytest.fixture(scope="module", autouse=True)
def _on_one_device():
    with one_device():
        yield
