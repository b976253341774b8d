"""A checkpoint's own settings of generation give what ``generate`` of transformers gives."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.weights import CheckpointError
from tests.weights import checkpoints

ROWS, NEW = 12, 9
VOCAB = 30
SIZES = checkpoints.BART | dict(vocab_size=VOCAB, max_position_embeddings=24)
IDS = {key: value for key, value in SIZES.items() if key.endswith("token_id")}
BART = dict(forced_bos_token_id=7, forced_eos_token_id=2, no_repeat_ngram_size=2, min_length=6)
SUPPRESSED = dict(suppress_tokens=[5, 6, 7, 8], begin_suppress_tokens=[9, 10], min_new_tokens=3)
MARIAN = dict(bad_words_ids=[[1], [19, 19], [22], [2]])
SEVERAL_ENDS = dict(eos_token_id=[2, 11, 12], min_length=4)
TWO_LENGTHS = SEVERAL_ENDS | dict(min_new_tokens=2)
BEAMS = dict(num_beams=3, length_penalty=2.0, early_stopping=True, no_repeat_ngram_size=3)


def saved(tmp_path, name, settings, in_config=False):
    """A model of transformers and its checkpoint, which asks for these settings; weights make it babble."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    family, cls = {
        "bart": ("BartConfig", "BartForConditionalGeneration"),
        "marian": ("MarianConfig", "MarianMTModel"),
    }[name]
    sizes = {key: value for key, value in SIZES.items() if key != "model_type"}
    model = getattr(transformers, cls)(getattr(transformers, family)(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.data.normal_(std=0.5)
    model.generation_config = transformers.GenerationConfig(**IDS | settings)
    model.save_pretrained(tmp_path)
    if in_config:  # as early versions wrote them
        (tmp_path / "generation_config.json").unlink()
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | settings))
    return getattr(transformers, cls).from_pretrained(tmp_path).eval()


def theirs(model, source, **options):
    import torch

    tokens = model.generate(torch.tensor(source), max_new_tokens=NEW, **options)[:, 1:]
    found = np.full((ROWS, NEW), SIZES["pad_token_id"])
    found[:, : tokens.shape[1]] = tokens
    return found


def ours(folder, source, **changes):
    model, params, _ = xa.load(folder)
    options = model.generation(max_length=NEW, **changes)
    run = jax.jit(lambda p: xa.decode.translate(xa.functional.bind(model, p), source, **options))
    return np.asarray(run(params).tokens[:, 0])


@pytest.fixture
def source():
    return np.random.default_rng(0).integers(3, VOCAB, (ROWS, 6))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("in_config", [False, True], ids=["generation_config", "config"])
@pytest.mark.parametrize(
    "name, settings",
    [
        ("bart", BART),
        ("bart", SUPPRESSED | dict(forced_bos_token_id=14)),
        ("bart", SEVERAL_ENDS),
        ("bart", TWO_LENGTHS),
        ("bart", BEAMS),
        ("marian", MARIAN),
    ],
    ids=["forced", "suppressed", "ends", "lengths", "beams", "words"],
)
def test_settings_do_what_they_do_in_transformers(tmp_path, source, name, settings, in_config):
    model = saved(tmp_path, name, settings, in_config)
    expected = theirs(model, source)
    np.testing.assert_array_equal(ours(tmp_path, source), expected)
    model.generation_config = type(model.generation_config)(**IDS)
    assert not np.array_equal(theirs(model, source), expected)  # the settings mattered


@pytest.mark.filterwarnings("ignore")
def test_changes_are_those_of_generate(tmp_path, source):
    model = saved(tmp_path, "bart", BEAMS | BART)
    changes = dict(num_beams=1, forced_bos_token_id=9, decoder_start_token_id=3, min_length=0)
    np.testing.assert_array_equal(
        ours(tmp_path, source, **changes), theirs(model, source, **changes)
    )


def described(**settings):
    return xa.weights.describe(checkpoints.BART | settings)


def test_ids_have_all_the_ends():
    assert described(eos_token_id=[2, 4]).ids == {"bos_id": 2, "eos_id": (2, 4), "pad_id": 1}
    assert described(eos_token_id=[2]).ids["eos_id"] == 2


def test_what_the_settings_of_generation_leave_open_is_the_configs():
    model = dataclasses.replace(
        described(), generation_text='{"pad_token_id": null, "eos_token_id": 5}'
    )
    assert model.ids == {"bos_id": 2, "eos_id": 5, "pad_id": 1}


def test_a_checkpoint_that_asks_for_nothing_gets_its_ids_and_no_more():
    model = described()
    found = model.generation(max_length=5)
    assert found == {**model.ids, "max_length": 5, "processors": ()}


@pytest.mark.parametrize(
    "settings, neutral",
    [
        (dict(do_sample=True), "do_sample=False"),
        (dict(repetition_penalty=1.2), "repetition_penalty=1.0"),
        (dict(encoder_no_repeat_ngram_size=3), "encoder_no_repeat_ngram_size=0"),
    ],
)
def test_what_is_not_done_is_refused_with_the_way_round_it(settings, neutral):
    model = described(**settings)
    with pytest.raises(CheckpointError, match="not supported; generation.*") as raised:
        model.generation(max_length=5)
    assert neutral in str(raised.value)
    name, _, value = neutral.partition("=")
    assert model.generation(max_length=5, **{name: json.loads(value.lower())})["processors"] == ()


def test_an_unknown_change_is_refused():
    with pytest.raises(ValueError, match="got num_beam; expected some of num_beams"):
        described().generation(max_length=5, num_beam=3)


def test_the_pair_asks_for_what_its_decoder_does():
    half = {key: value for key, value in checkpoints.BERT.items()}
    pair = dict(
        model_type="encoder-decoder",
        encoder=half,
        decoder=half
        | dict(is_decoder=True, add_cross_attention=True, bos_token_id=3, eos_token_id=4)
        | dict(suppress_tokens=[5]),
    )
    [ban] = xa.weights.describe(pair).generation(max_length=5)["processors"]
    assert np.isinf(ban(jnp.zeros(8), None)).tolist() == [False] * 5 + [True] + [False] * 2
