"""Shape annotations are checked in every test; tiny programs are compiled without costly passes."""

import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path

import jax
import jaxlib.version
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests import annotations  # noqa: F401  the hook takes it from its package

jaxtyping.install_import_hook("crossattn", "tests.annotations.checked")

ROOT = Path(__file__).parents[1]
# Of its two ways to compile fused loops, the older takes half as long; later versions lack it.
_QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if jaxlib.version.__version_info__ < (0, 11):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}"


# Tracing makes many objects that live: collecting them often takes a tenth of the time.
gc.set_threshold(50_000, 50, 100)

# What each of two workers begins with: both end together, and one alone makes the run that is resumed.
_FIRST = (
    ("tests/experiments/test_resume.py", "[02_train_and_align]"),
    ("[01_attention_from_scratch]", "[03_pretrained]", "tests/experiments/test_scale.py"),
)


def pytest_collection_modifyitems(items):
    """The longest stand first in the half that each of two workers begins with."""
    first: list[list[pytest.Item]] = [
        [item for item in items if any(part in item.nodeid for part in parts)] for parts in _FIRST
    ]
    rest = [item for item in items if not any(item in some for some in first)]
    half = len(rest) // 2
    items[:] = first[0] + rest[:half] + first[1] + rest[half:]


@pytest.fixture(scope="session", autouse=True)
def _compile_quickly():
    """Tiny shapes take longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def with_devices(count):
    """The environment of a process with so many devices, which compiles as the tests do."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": flags,
    }


def on_eight_devices(*command):
    """What ``python COMMAND`` prints in a process of eight devices, which must end well."""
    done = subprocess.run(
        [sys.executable, *command],
        env=with_devices(8),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_users_have_it():
    """The environment of a process that compiles with XLA's defaults, as the tests do not."""
    flags = os.environ.get("XLA_FLAGS", "").replace(_QUICK, "").strip()
    found = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    found.pop("XLA_FLAGS", None)
    return found | ({"XLA_FLAGS": flags} if flags else {})


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


@pytest.fixture(scope="session")
def store_servers():
    """A server of gs://, which this process and those that it starts speak to."""
    from tests.store_servers import serving

    with serving() as environment, pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        yield


@pytest.fixture
def store(store_servers):
    """A new folder in a store."""
    from tests.store_servers import fresh

    return fresh()


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
