"""Eight devices for all tests; shape annotations are checked; tiny programs compile without costly passes."""

import collections
import contextlib
import gc
import hashlib
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import jax
import jaxlib.version
import jaxtyping
import pytest
from hypothesis import settings
from jax.experimental.compilation_cache import compilation_cache

from tests import annotations

jaxtyping.jaxtyped = annotations.jaxtyped  # which the hook applies
jaxtyping.install_import_hook("crossattn", "beartype.beartype")

ROOT = Path(__file__).parents[1]
DEVICES = "--xla_force_host_platform_device_count="
# XLA's older emitters of fused loops compile in half the time; later versions lack them.
_QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if jaxlib.version.__version_info__ >= (0, 11):
    _QUICK = ""


def _flags(count, quick=_QUICK):
    """XLA_FLAGS of the user, with so many devices and the tests' own way to compile."""
    own = {DEVICES, *_QUICK.split()}
    given = os.environ.get("XLA_FLAGS", "").split()
    users = [flag for flag in given if flag not in own and not flag.startswith(DEVICES)]
    return " ".join([*users, f"{DEVICES}{count}", quick]).strip()


def _kept_programs():
    """A folder of the virtual environment for compiled programs; one for each kind of processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else [platform.processor()]
    features = next((x for x in lines if x.startswith(("flags", "Features"))), lines[0])
    kind = hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]
    return str(Path(sys.prefix, "cache", f"xla-{kind}"))


# JAX reads the flags when it is first asked for devices, which is after this file.
os.environ["XLA_FLAGS"] = _flags(8)
# Which line of Python an operation comes from, in a program that nobody profiles: a tenth of the time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
jax.config.update(
    "jax_traceback_in_locations_limit", int(os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"])
)
_KEPT = {
    "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir,
    "jax_persistent_cache_min_compile_time_secs": 0.0,  # to read a little program is a tenth of making it
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
if sys.prefix != sys.base_prefix and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _KEPT["jax_compilation_cache_dir"] = _kept_programs()
for _name, _value in _KEPT.items():
    if _value is not None:
        os.environ[_name.upper()] = str(_value)  # of the processes that tests start
        jax.config.update(_name, _value)

# `make fuzz` draws more, and draws anew; everything else draws the same each time.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))

# Tracing makes many objects that live: collecting them often takes a tenth of the time.
gc.set_threshold(50_000, 50, 100)

# What each of two workers begins with: both end together, and one alone makes the run that is resumed.
_FIRST = (
    ("tests/experiments/test_resume.py", "[02_train_and_align]"),
    ("[01_attention_from_scratch]", "[03_pretrained]", "tests/experiments/test_scale.py"),
)


_SKIPPED = "crossattn/skipped"  # in pytest's cache


def pytest_addoption(parser):
    parser.addoption(
        "--skipped-before",
        action="store_true",
        help="run what the last run skipped, which packages that were installed since may need",
    )
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="skip what would begin after this time, in seconds since 1970",
    )


class _Skips:
    """Remembers the tests that this run skips."""

    def __init__(self):
        self.found = []

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.found.append(report.nodeid)

    def pytest_sessionfinish(self, session):
        session.config.cache.set(_SKIPPED, self.found)


def pytest_configure(config):
    # A worker's reports come to the process that started it.
    if not hasattr(config, "workerinput") and config.pluginmanager.has_plugin("cacheprovider"):
        config.pluginmanager.register(_Skips())


def pytest_runtest_setup(item):
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("no time was left for it")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of a test marked quick(n), all parameters after the first n are slow; the longest tests stand first."""
    if config.getoption("--skipped-before"):
        before = set(config.cache.get(_SKIPPED, ()))
        config.hook.pytest_deselected(items=[x for x in items if x.nodeid not in before])
        items[:] = [x for x in items if x.nodeid in before]
    seen = collections.Counter()
    for item in items:
        if marked := item.get_closest_marker("quick"):
            function = item.parent.nodeid, item.function
            seen[function] += 1
            if seen[function] > marked.args[0]:
                item.add_marker(pytest.mark.slow)
    # In the half that each of two workers begins with.
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
    return _environment() | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": _flags(count),
    }


def as_users_have_it():
    """The environment of a process of one device that compiles all anew, with XLA's defaults."""
    kept_here = {name.upper() for name in _KEPT}
    users = {name: value for name, value in _environment().items() if name not in kept_here}
    return users | {"XLA_FLAGS": _flags(1, quick="")}


def _environment():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def on_eight_devices(*command):
    """The output of ``python COMMAND`` in a process of eight devices, which must end well."""
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


@contextlib.contextmanager
def one_device():
    """Inside, code that asks JAX for its devices finds one."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("devices", "local_devices"):
            first = getattr(jax, name)()[:1]
            patched.setattr(jax, name, lambda *_, first=first, **__: list(first))
        for name in ("device_count", "local_device_count"):
            patched.setattr(jax, name, lambda *_, **__: 1)
        yield


@pytest.fixture
def in_production():
    """Turns off the tests' runtime type checks, so that the library's own refusals are reached."""
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
    before = {name: getattr(jax.config, name) for name in _KEPT}
    for values in (before | {"jax_compilation_cache_dir": folder}, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if values is not before:
            yield
