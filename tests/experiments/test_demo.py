"""The demo from end to end, with a tiny config in the place of its own."""

import json

import pytest
from matplotlib import image

from configs import libreoffice
from crossattn.data import phrases
from crossattn.data.errors import DataUnavailable
from experiments import demo


@pytest.fixture
def tiny(monkeypatch):
    """Fewer sentences, and the tiny config under both names; what the demo asked for is kept."""
    asked = []
    monkeypatch.setattr(phrases, "NUM_PAIRS", 600)
    for module in (demo.libreoffice, demo.greek_english):
        own = module.__name__

        def get_config(own=own):
            asked.append(own)
            return tiny_config("tiny")

        tiny_config = libreoffice_config
        monkeypatch.setattr(module, "get_config", get_config)
    return asked


libreoffice_config = libreoffice.get_config


def test_the_demo_trains_scores_and_draws_and_says_so_again(launched, tiny, tmp_path):
    workdir = tmp_path / "demo"
    code, out, err = launched("demo", f"--workdir={workdir}")
    assert code == 0 and "Traceback" not in err
    assert tiny == ["configs.libreoffice"]
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
    tiny, monkeypatch, tmp_path, capsys
):
    def unavailable(name):
        raise DataUnavailable(f"{name}: there is no apt-get here, put x.deb in y.")

    monkeypatch.setattr(demo, "open_source", lambda name: unavailable("libreoffice_help/en-fr"))
    config = demo._config(tmp_path)
    assert tiny == ["configs.libreoffice", "configs.greek_english"] and config.seed == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "no apt-get here" in said and said.endswith("Training Greek to English instead.\n")


def test_a_run_that_was_begun_goes_on_with_its_own_config(tiny, copied_run):
    config = demo._config(copied_run)
    assert tiny == [] and config.train.steps == 40
