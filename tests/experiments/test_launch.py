"""What launchers have in common: packages they cannot do without, programs kept from start to start."""

import sys

import jax
import jax.numpy as jnp
import pytest

from experiments import launch
from tests.conftest import kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs go when nothing else is said, and JAX told nothing yet."""
    monkeypatch.setenv("CROSSATTN_DATA", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with kept(None):
        yield tmp_path / "compiled"


def test_programs_are_kept_in_the_data_folder(folder):
    launch.keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # of so small a program
    jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((3, 3)))
    assert list(folder.glob("*-cache"))


@pytest.mark.parametrize("level", ["compiled", "above"])
def test_programs_are_not_taken_from_where_others_may_write(folder, level, capsys):
    folder.mkdir()
    (folder if level == "compiled" else folder.parent).chmod(0o777)
    launch.keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None
    said = capsys.readouterr().err
    assert f"{folder} is not used for compiled programs: others may write to" in said


@pytest.mark.parametrize("named", ["", "/elsewhere"])
def test_the_variable_of_jax_names_another_folder_or_none(folder, monkeypatch, named):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", named)
    launch.keep_compiled()
    # JAX read the variable when it was imported.
    assert jax.config.jax_compilation_cache_dir is None


def test_translate_needs_matplotlib_before_anything_to_draw(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refused("translate", "--workdir=no", "a", "--plot=a.png")
    assert said == "error: matplotlib is not installed: pip install 'crossattn[viz]'\n"


def test_a_package_that_is_missing_halfway_is_one_line(refused, monkeypatch):
    def main(_):
        raise ImportError("reading x needs tokenizers: pip install 'crossattn[weights]'")

    monkeypatch.setattr("experiments.translate.main", main)
    assert "error: reading x needs tokenizers: pip install" in refused("translate")
