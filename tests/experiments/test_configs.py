"""Every config file is found here by itself: a new one is tested as soon as it is there."""

import importlib
import json
import math

import pytest
from ml_collections import ConfigDict

from crossattn.data import phrases
from experiments import train
from experiments.settings import train_config
from tests.experiments.conftest import ROOT

FILES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
CONFIGS = [
    name for name in FILES if hasattr(importlib.import_module(f"configs.{name}"), "get_config")
]


def get_config(name, *argument):
    return importlib.import_module(f"configs.{name}").get_config(*argument)


def test_the_configs_of_the_project_are_found():
    expected = {"copy_task", "greek_english", "libreoffice", "lm_small", "wmt14_de_en"}
    assert expected <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_trains_to_a_finite_and_falling_loss(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(phrases, "NUM_PAIRS", 540)  # Mostly short ones: few shapes to compile.
    result = train.run(get_config(name, "tiny"), tmp_path)
    assert result.status == "finished"
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) >= 3 and all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert math.isfinite(result.evaluation["loss"])
    assert f"results are in {tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize("name", CONFIGS)
def test_the_whole_experiment_builds_and_holds_only_values(name):
    config = get_config(name)
    assert isinstance(config, ConfigDict)
    json.dumps(config.to_dict(), allow_nan=False)
    assert train_config(config).steps > train_config(get_config(name, "tiny")).steps
    assert config.data.name != "phrases"


@pytest.mark.parametrize("language", ["fr", "de", "es", "ja", "hi"])
def test_every_language_of_the_help_has_a_config(language):
    assert get_config("libreoffice", language).data.name == f"libreoffice_help/en-{language}"
    for both in (f"{language},tiny", f"tiny,{language}"):
        tiny = get_config("libreoffice", both)
        assert tiny.data.name == "phrases"
        train_config(tiny)


def test_japanese_is_scored_by_characters():
    assert get_config("libreoffice", "ja").evaluate.bleu_tokenize == "char"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_variant_that_there_is_none_of_is_refused(name):
    with pytest.raises(ValueError, match="no variant 'huge'; it has tiny"):
        get_config(name, "tiny,huge")
