"""Shape annotations are checked in every test; tiny programs are compiled without costly passes."""

import jax
import jaxtyping
import pytest

jaxtyping.install_import_hook("crossattn", "beartype.beartype")


@pytest.fixture(scope="session", autouse=True)
def _compile_quickly():
    """Tiny shapes take longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def in_production():
    """Without the runtime type checks of the tests, which refuse first what the code refuses."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
