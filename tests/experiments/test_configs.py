"""Every config file is found here by itself: a new one is tested as soon as it is there."""

import functools
import importlib
import itertools
import json
import math
import re

import jax
import pytest
from ml_collections import ConfigDict

from configs import t5
from crossattn import functional
from crossattn.data.sources import phrases
from crossattn.models import Transformer
from experiments import train
from experiments.errors import SettingsError
from experiments.settings import check, model_config, train_config
from experiments.tasks.denoising import vocabulary
from tests.experiments.conftest import ROOT

FILES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
CONFIGS = [
    name for name in FILES if hasattr(importlib.import_module(f"configs.{name}"), "get_config")
]


def get_config(name, *argument):
    return importlib.import_module(f"configs.{name}").get_config(*argument)


# One for most kinds of task; the others are in `make test-all`.
QUICK = {"libreoffice", "lm_small"}
assert set(CONFIGS) > QUICK


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS]
)
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


def variants(name):
    """The words of a config's argument, as the refusal of another lists them."""
    with pytest.raises(ValueError, match="no variant") as refused:
        get_config(name, "no such word")
    return re.search(r"it has (.*)\.$", str(refused.value))[1].split(", ")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_variant_is_a_config_that_can_be_trained_once_it_has_its_weights(name):
    for variant in variants(name):
        config = get_config(name, variant)
        if config.model.name == "pretrained":
            continue  # its checkpoint says what fits
        if (init := config.get("init")) is not None and init["from"] is None:
            with pytest.raises(SettingsError, match="init.from is none"):
                check(config)
            init["from"] = "runs/any"
        check(config)


@pytest.mark.parametrize("language", ["fr", "de", "es", "ja", "hi"])
def test_every_language_of_the_help_has_a_config(language):
    config = get_config("libreoffice", language)
    assert config.data.name == f"libreoffice_help/en-{language}"
    assert config.evaluate.bleu_tokenize == ("char" if language == "ja" else None)
    for both in (f"{language},tiny", f"tiny,{language}"):
        tiny = get_config("libreoffice", both)
        assert tiny.data.name == "phrases"
        train_config(tiny)


@pytest.mark.parametrize("name", ["t5_1b", "t5_11b"])
def test_t5_has_each_chip_and_objective_in_any_order(name):
    for chip, objective in itertools.product(t5.CHIPS, t5.OBJECTIVES):
        config = get_config(name, f"{chip},{objective}")
        assert config == get_config(name, f"{objective},{chip}")
        values, data = train_config(config), config.data
        assert data.objective == objective and data.source_len == 512
        assert data.batch_size % (values.mesh.fsdp * values.accumulate) == 0
        for axis in ("num_heads", "mlp_dim", "dim"):
            assert config.model[axis] % values.mesh.tensor == 0
        assert config.model.dim % values.mesh.fsdp == 0
        train_config(get_config(name, f"tiny,{chip},{objective}"))
    spans, prefix = (get_config(name, objective).data for objective in t5.OBJECTIVES)
    assert (spans.target_len, prefix.target_len) == (114, 512)


def test_variants_that_exclude_each_other_are_refused():
    for name, both in (("t5_1b", "v5e,h100"), ("wmt14_de_en", "base,big")):
        with pytest.raises(ValueError, match="exclude each other; name one of them"):
            get_config(name, both)


@pytest.mark.parametrize(("size", "millions"), [("base", 65), ("big", 213)])
def test_wmt_models_are_those_of_the_paper(size, millions):
    """Vaswani et al. 2017, table 3, last column."""
    config = get_config("wmt14_de_en", size)
    D, F, L = config.model.dim, config.model.mlp_dim, 6
    count = parameters(model_config(config.model, vocab_size=37000, max_length=256))
    tables, norms = 37000 * D, 2 * D * (2 * L + 3 * L + 2)
    blocks = L * (4 + 8) * (D * D + D) + 2 * L * (2 * D * F + F + D)
    assert count == tables + norms + blocks
    assert count == pytest.approx(millions * 1e6, rel=0.04)
    assert 24_000 <= config.data.batch_size * config.data.target_len <= 26_000


@pytest.mark.parametrize(("name", "billions"), [("t5_1b", 1.0), ("t5_11b", 11.1)])
def test_t5_models_have_as_many_parameters_as_their_names_say(name, billions):
    """Against the arithmetic of T5 v1.1: no biases, three matrices a feed-forward network, two tables."""
    model = get_config(name).model
    D, F, A, L = model.dim, model.mlp_dim, 64 * model.num_heads, model.encoder_layers
    encoder = L * (4 * D * A + 3 * D * F + 2 * D) + D
    decoder = L * (8 * D * A + 3 * D * F + 3 * D) + D
    expected = encoder + decoder + 2 * 32128 * D + 2 * 32 * model.num_heads
    count = parameters(model_config(model, vocab_size=vocabulary(32000, 100), max_length=512))
    assert count == expected == pytest.approx(billions * 1e9, rel=0.03)
    if name == "t5_11b":
        assert count == 11_135_332_352  # google/t5-v1_1-xxl


def parameters(config):
    """How many there are, none of which is made."""
    build = functools.partial(Transformer, config)
    shapes = jax.eval_shape(
        lambda key: functional.init(lambda rngs: build(rngs=rngs), key), jax.random.key(0)
    )
    return sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_variant_that_there_is_none_of_is_refused(name):
    with pytest.raises(ValueError, match="no variant 'huge'; it has tiny"):
        get_config(name, "tiny,huge")
