"""Launchers run in this process, with the command line of a shell; one tiny run for all to read.

Compiled code is kept on disk for the session: these tests start the same few models many times.
"""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import grain  # noqa: F401  or flagsaver takes back the flags that its first import defines
import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from crossattn.train.checkpoint import load_params
from experiments import launch, train
from experiments.settings import saved_config
from experiments.tasks import make_task
from tests.conftest import kept, one_device, with_devices

ROOT = Path(__file__).parents[2]
TINY = f"--config={ROOT}/configs/libreoffice.py:fr,tiny"
# Of the run that the tests share: long enough to be killed in.
STEPS = (
    "--config.train.steps=32",
    "--config.train.log_every=1",
    "--config.checkpoint.every=4",
    "--config.evaluate.examples=0",
)


@pytest.fixture(scope="module", autouse=True)
def _keep_compiled_code(compiled_code):
    with kept(compiled_code):
        yield


@pytest.fixture(scope="module", autouse=True)
def _on_one_device():
    with one_device():
        yield


def start(launcher, *arguments, cwd=ROOT):
    """The exit code of ``python -m experiments.LAUNCHER ARGUMENTS`` in a folder, run here."""
    main = importlib.import_module(f"experiments.{launcher}").main
    before, home = sys.argv, os.getcwd()
    sys.argv = [launcher, *map(str, arguments)]
    os.chdir(cwd)
    try:
        with flagsaver.flagsaver(), warnings.catch_warnings():
            # How ml_collections reads a config file.
            warnings.filterwarnings("ignore", r"the load_module\(\)", DeprecationWarning)
            for name in ("config", "workdir"):
                flags.FLAGS[name].unparse()
            launch.run(main)
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = before
        os.chdir(home)
        sys.modules.pop("config_config", None)  # Or the next config file is run on top of it.


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, compiled_code):
    """The work directory of a finished run, which no test may change."""
    workdir = tmp_path_factory.mktemp("tiny") / "run"
    with kept(compiled_code), one_device():
        assert start("train", TINY, *STEPS, f"--workdir={workdir}") == 0
    return workdir


@pytest.fixture
def copied_run(tiny_run, tmp_path):
    """A copy of the finished run, to change at will."""
    return shutil.copytree(tiny_run, tmp_path / "run")


@pytest.fixture(scope="session")
def parameters():
    """Reads the parameters of a run's newest checkpoint."""

    def read(workdir):
        task = make_task(saved_config(workdir), workdir / "assets")
        target = jax.eval_shape(task.init, jax.random.key(0))
        return jax.device_get(load_params(workdir / "checkpoints", target)[0])

    return read


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a config for so many steps: the work directory."""

    def run(config, steps):
        workdir = tmp_path_factory.mktemp("run")
        config.train.steps = steps
        train.run(config, workdir)
        return workdir

    return run


@pytest.fixture
def launched(capsys):
    """Starts a launcher: (exit code, stdout, stderr)."""

    def run(launcher, *arguments):
        capsys.readouterr()
        with one_device():
            code = start(launcher, *arguments)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(launched):
    """Starts a launcher that must refuse: the one line it says, with exit code 2."""

    def run(launcher, *arguments):
        code, out, err = launched(launcher, *arguments)
        assert code == 2, (code, out, err)
        assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
        assert "Traceback" not in out + err
        return err

    return run


@pytest.fixture
def killed_at(environment):
    """Starts a launcher in a process of its own, and kills it once its run has logged so many steps."""

    def run(step, workdir, launcher, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", f"experiments.{launcher}", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while steps_logged(workdir) < step and process.poll() is None:
            time.sleep(0.002)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL

    return run


def steps_logged(workdir):
    """How many lines the log of a run has."""
    path = workdir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="session")
def environment(compiled_code):
    """The environment of a launcher in a process of its own, which compiles as the tests do."""
    return with_devices(1) | {"JAX_COMPILATION_CACHE_DIR": compiled_code}
