"""The compiled kernel's library: one process compiles, nothing damaged or foreign is loaded."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time

import pytest

from crossattn import __main__ as program
from crossattn.ops.native import build

pytestmark = pytest.mark.skipif(build.fcntl is None, reason="locks and owners are those of POSIX")

# Writes down that it was called and takes its time, so that processes meet.
STUB = """#!/bin/sh
echo "$@" >> {log}
sleep {seconds}
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Installs a compiler that is quick to compile nothing; returns the libraries that it linked."""
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()

    def install(seconds=0.0):
        (folder / "c++").write_text(STUB.format(log=log, seconds=seconds))
        (folder / "c++").chmod(0o755)

    def linked():
        return log.read_text().count("-shared") if log.exists() else 0

    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    install()
    linked.install = install
    linked.folder = tmp_path / "cache" / "crossattn"
    return linked


def start():
    """Another process that wants the library."""
    return subprocess.Popen(
        [sys.executable, "-m", "crossattn", "build"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_of_several_processes_one_compiles_and_the_others_wait_for_it(compiler):
    compiler.install(seconds=1)
    outs, errors = zip(
        *(p.communicate(timeout=120) for p in [start() for _ in range(4)]), strict=True
    )
    assert compiler() == 1
    assert len(set(outs)) == 1
    assert outs[0].strip().endswith(".so")
    assert sum("compiling attention" in said for said in errors) == 1
    assert all(said.count("\n") <= 1 for said in errors)


def test_the_library_of_a_killed_builder_is_built_by_the_next(compiler, tmp_path):
    compiler.install(seconds=30)
    builder = start()
    while not (tmp_path / "calls").exists():
        assert builder.poll() is None, builder.communicate()
        time.sleep(0.02)
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    os.killpg(builder.pid, signal.SIGKILL)  # its compilers, which outlive it
    builder.communicate()
    assert not list(compiler.folder.glob("*.so"))
    compiler.install()
    assert build.library().read_text() == "library\n"
    assert [path.name for path in compiler.folder.iterdir() if path.suffix != ".so"] == [
        ".building"
    ]


def test_what_is_compiled_is_said_once_with_the_way_to_do_it_ahead(compiler, capsys):
    assert program.main(["build"]) == 0
    first = capsys.readouterr()
    assert first.err.count("\n") == 1
    assert "python -m crossattn build" in first.err
    assert program.main(["build"]) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert not second.err
    assert compiler() == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:3]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes().replace(b"l", b"m", 1)),
        lambda path: path.chmod(0o777),
    ],
    ids=["truncated", "empty", "one_bit", "others_may_write"],
)
def test_a_damaged_library_is_compiled_again(compiler, damage):
    damage(build.library())
    again = build.library()
    assert again.read_text() == "library\n"
    assert not again.stat().st_mode & stat.S_IWOTH
    assert compiler() == 2
    assert list(compiler.folder.glob("*.so")) == [again]


@pytest.mark.parametrize("level", ["crossattn", "above"])
def test_a_folder_that_others_may_write_to_is_not_used(compiler, level, capsys):
    planted = build.library()
    open_to_all = planted.parent if level == "crossattn" else planted.parent.parent
    open_to_all.chmod(0o777)
    capsys.readouterr()
    library = build.library()
    assert library.parent.name == f"crossattn-{os.geteuid()}"
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    warning, compiling = capsys.readouterr().err.splitlines()
    assert str(planted.parent) in warning
    assert "others may write to" in warning
    assert "compiling" in compiling
    assert build.library() == library  # it is kept there
    assert compiler() == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(compiler, capsys):
    folder = build.library().parent
    os.chown(folder, 4321, 4321)
    assert build.library().parent != folder
    assert "belongs to another user (id 4321)" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_gives_what_it_has_and_no_more(compiler, monkeypatch):
    library, writable = build.library(), os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != compiler.folder and writable(path, mode)
    )
    assert build.library() == library
    library.unlink()
    assert build.library().parent.name == f"crossattn-{os.geteuid()}"


def test_without_a_folder_of_ones_own_there_is_no_library(compiler, tmp_path, capsys):
    for folder in (compiler.folder, tmp_path / "temporary" / f"crossattn-{os.geteuid()}"):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    with pytest.raises(build.Unavailable, match="others may write to it.*; .*others may"):
        build.library()
    assert program.main(["build"]) == 1
    assert "others may write to it" in capsys.readouterr().err.splitlines()[-1]
