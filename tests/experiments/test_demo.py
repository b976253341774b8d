"""The demo from end to end, with a tiny config in the place of its own."""

import json

import pytest
from matplotlib import image

from configs import libreoffice
from crossattn.data.errors import DataUnavailable
from crossattn.data.sources import phrases
from experiments import demo

TINY = libreoffice.get_config("tiny")


@pytest.fixture
def asked(monkeypatch):
    """A tiny config and few sentences in the place of either; which of them was asked for."""
    names = []
    monkeypatch.setattr(phrases, "NUM_PAIRS", 540)
    for name in ("libreoffice", "greek_english"):

        def get_config(name=name):
            names.append(name)
            return TINY.copy_and_resolve_references()

        monkeypatch.setattr(getattr(demo, name), "get_config", get_config)
    return names


@pytest.mark.slow
def test_the_demo_trains_scores_and_draws_and_says_so_again(launched, asked, tmp_path):
    workdir = tmp_path / "demo"
    code, out, err = launched("demo", f"--workdir={workdir}")
    assert code == 0 and "Traceback" not in err
    assert asked == ["libreoffice"]
    results = json.loads((workdir / "results-test.json").read_text())
    for name in ("test sentences", "BLEU", "chrF", "AER", "tokens/s"):
        assert any(line.strip().startswith(name) for line in out.splitlines()), name
    assert out.count("  translation  ") == 3 and str(workdir) in out
    assert f"{results['bleu']:.1f}" in out and results["training_tokens"] > 0
    assert list((workdir / "tensorboard").iterdir()) and list((workdir / "checkpoints").iterdir())
    assert (workdir / "metrics.jsonl").read_text().count("\n") == 5
    assert min(image.imread(workdir / "alignments.png").shape[:2]) > 50

    code, again, _ = launched("demo", f"--workdir={workdir}")
    assert code == 0
    first, table = again.split("\n", 1)
    assert first == f"The run in {workdir} is finished; its results:"
    assert out.endswith(table)


def test_without_the_packages_it_says_so_in_one_line_and_trains_on_greek(
    asked, monkeypatch, tmp_path, capsys
):
    def unavailable(name):
        raise DataUnavailable("there is no apt-get here; put x.deb in y.")

    monkeypatch.setattr(demo, "open_source", unavailable)
    demo._config(tmp_path)
    assert asked == ["libreoffice", "greek_english"]
    said = "there is no apt-get here; put x.deb in y. Training Greek to English instead.\n"
    assert capsys.readouterr().out == said


def test_a_run_that_was_begun_goes_on_with_its_own_config(asked, tiny_run):
    config = demo._config(tiny_run)
    assert asked == [] and config.train.steps == 32
