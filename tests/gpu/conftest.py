"""Tests of what a GPU computes; without one nothing here is collected, and pytest ends with code 5."""

import importlib.util

import jax
import pytest

from crossattn.ops import backends

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_HERE = any(importlib.util.find_spec(name) for name in _PLUGINS) and jax.default_backend() == "gpu"
collect_ignore_glob = [] if _HERE else ["test_*.py"]


@pytest.fixture
def many_queries(monkeypatch):
    """Kernels serve few queries too: those of the conformance suite are few."""
    monkeypatch.setattr(backends, "_FEW", 0)
