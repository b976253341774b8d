"""Tiny shapes take longer to compile than to run, so this folder compiles without costly passes."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def compile_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
