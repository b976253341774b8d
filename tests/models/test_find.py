"""A name finds the file of an architecture, here or on the import path."""

import pytest

from crossattn import models


@pytest.mark.parametrize("name", models.known())
def test_every_architecture_has_its_config_its_module_and_a_tiny_one(name):
    found = models.find(name)
    assert found.config.__name__ == f"{found.module.__name__}Config"
    assert isinstance(found.tiny(), found.config)


def test_a_module_of_ones_own_may_write_its_name_its_own_way(tmp_path, monkeypatch):
    (tmp_path / "own_models").mkdir()
    text = "class PerceiverIO: ...\nclass PerceiverIOConfig: ...\ndef tiny(): ...\n"
    (tmp_path / "own_models" / "perceiver_io.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = models.find("own_models.perceiver_io")
    assert found.module.__name__ == "PerceiverIO"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "gpt",
            "no model 'gpt'; expected one of attention_sum_reader, bert, clip, crossvit, decoder",
        ),
        ("../up", "no model '../up'; expected one of attention_sum_reader, bert"),
        ("nowhere.gpt", "'nowhere.gpt' cannot be imported"),
        ("json.scanner", "json.scanner has no Scanner and no ScannerConfig and no tiny"),
    ],
)
def test_an_unknown_name_is_answered_by_what_there_is(name, said):
    with pytest.raises(ValueError, match=said.replace(".", "[.]")):
        models.find(name)
