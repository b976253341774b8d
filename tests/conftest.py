"""Shape annotations are checked in every test; tiny programs are compiled without costly passes."""

import contextlib

import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

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


@pytest.fixture(scope="session")
def compiled_code(tmp_path_factory):
    """The folder where compiled code is kept."""
    return jax.config.jax_compilation_cache_dir or str(tmp_path_factory.mktemp("compiled"))


@contextlib.contextmanager
def kept(folder):
    """Compiled code goes to a folder, and is taken from there."""
    new = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    old = {name: getattr(jax.config, name) for name in new}
    for values in (new, old):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is new:
            yield
