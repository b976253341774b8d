"""Files come from package clients, or from the user's hand; half of one never counts."""

import hashlib
import os
import sys

import pytest

from crossattn.data import archives, fetch
from crossattn.data.errors import DataUnavailable

from .conftest import write_deb


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Installs a fake apt-get that runs a shell script and logs its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "calls"

    def install(script: str) -> None:
        program = folder / "apt-get"
        program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{script}\n')
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    install.calls = lambda: log.read_text().splitlines() if log.exists() else []
    return install


def test_a_package_in_place_needs_no_client(tmp_path, client):
    client("exit 1")
    path = fetch.downloads_dir(tmp_path) / "some-help_4%3a7-1_all.deb"
    path.write_bytes(b"x")
    assert fetch.debian_packages(["some-help"], tmp_path) == [path]
    assert client.calls() == []


def test_a_package_is_downloaded_under_the_name_it_has(tmp_path, client):
    client("echo body > some-help_2_all.deb")
    (path,) = fetch.debian_packages(["some-help"], tmp_path)
    assert path == tmp_path / "downloads" / "some-help_2_all.deb"
    assert path.read_text() == "body\n"


def test_empty_package_lists_are_updated_once(tmp_path, client):
    lists = tmp_path / "lists"
    update, download = f"touch {lists}", f"test -e {lists} && touch some-help_2_all.deb"
    client(f'case "$*" in *update) {update};; *) {download};; esac')
    assert fetch.debian_packages(["some-help"], tmp_path)
    assert sum(call.endswith("update") for call in client.calls()) == 1


def test_a_failed_download_leaves_nothing_and_says_what_to_put_where(tmp_path, client):
    client("test $6 = update || echo half > some-help_2_all.deb; echo 'E: no network.' >&2; exit 9")
    with pytest.raises(DataUnavailable, match=r"put some-help_\*\.deb in .*downloads .*no network"):
        fetch.debian_packages(["some-help"], tmp_path)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_without_apt_the_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataUnavailable, match=r"put a_\*\.deb, b_\*\.deb in .*no apt-get"):
        fetch.debian_packages(["a", "b"], tmp_path)


def test_a_wheel_is_fetched_by_pip_and_pinned(tmp_path, monkeypatch):
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\nprintf body > my_data-1.0-py3-none-any.whl\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    good = hashlib.sha256(b"body").hexdigest()
    with pytest.raises(DataUnavailable, match="not the pinned file"):
        fetch.wheel("my-data", "1.0", "0" * 64, tmp_path)
    assert list((tmp_path / "downloads").iterdir()) == []
    path = fetch.wheel("my-data", "1.0", good, tmp_path)
    assert path.read_bytes() == b"body"
    path.write_bytes(b"other")
    with pytest.raises(DataUnavailable, match=f"the {path.name} there is not the pinned file"):
        fetch.wheel("my-data", "1.0", good, tmp_path)


def test_a_package_is_read_without_unpacking_it(tmp_path):
    path = tmp_path / "x_1_all.deb"
    write_deb(path, {"usr/share/a/b.html": "é", "usr/share/a/c.png": "no", "../../evil.html": "no"})
    assert list(archives.read_deb(path, "usr/share/", ".html")) == [("a/b.html", "é".encode())]
    assert list(tmp_path.iterdir()) == [path]


def test_the_data_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CROSSATTN_DATA", str(tmp_path / "here"))
    assert fetch.cache_dir() == tmp_path / "here"
    assert fetch.cache_dir(tmp_path / "there") == tmp_path / "there"
