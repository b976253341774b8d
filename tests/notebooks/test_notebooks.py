"""Every notebook runs from top to bottom, offline, as it stands."""

import nbformat
import pytest
from nbclient import NotebookClient

from crossattn.data import fetch
from tests.conftest import ROOT, with_devices

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS_PER_CELL = 300
BYTES = 400_000  # pictures included: a notebook should open at once


@pytest.fixture
def offline(monkeypatch):
    """The kernel finds this checkout, and no way to the network."""
    for name, value in with_devices(1).items():
        monkeypatch.setenv(name, value)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def weights(path, monkeypatch):
    """What a notebook with pretrained weights needs, when it was fetched before."""
    if "WHISPER_FOLDER" not in path.read_text(encoding="utf-8"):
        return
    folder = fetch.cache_dir() / "weights" / "whisper-tiny.en"
    if not folder.is_dir() or not any(fetch.downloads_dir().glob("pocketsphinx-testdata*")):
        pytest.skip(
            "not fetched yet: python -m experiments.fetch_weights tiny.en, and "
            "crossattn.data.speech.open_speech('librivox')"
        )
    monkeypatch.setenv("WHISPER_FOLDER", str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore")  # the warnings of the Jupyter machinery are not ours
def test_the_notebook_runs_without_an_error(path, offline, weights, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},  # what it writes stays out of the project
    )
    client.execute()  # raises CellExecutionError with the cell and its traceback


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_valid_small_and_starts_by_installing(path):
    assert path.stat().st_size < BYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert "%pip install" in first.source
    assert "except ModuleNotFoundError" in first.source
    about = notebook.cells[0].source  # where it opens, and what to do when it cannot install itself
    assert f"/blob/main/notebooks/{path.name})" in about
    assert "If that fails" in about and "make wheel" in about and "crossattn-*.whl" in first.source
    for cell in notebook.cells:
        assert not any(o.output_type == "error" for o in cell.get("outputs", []))
