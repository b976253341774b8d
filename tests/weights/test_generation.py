"""The settings of generation of a checkpoint give what ``generate`` of transformers gives."""

import ast
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import Context
from crossattn.decode.logits import processors
from crossattn.weights import CheckpointError, generation
from tests.peers import peer
from tests.weights import checkpoints

ROWS, NEW = 12, 9
VOCAB = 30
SIZES = checkpoints.BART | dict(vocab_size=VOCAB, max_position_embeddings=24)
IDS = {key: value for key, value in SIZES.items() if key.endswith("token_id")}
SETTINGS = {
    "forced": dict(forced_bos_token_id=7, forced_eos_token_id=2, no_repeat_ngram_size=2, min_length=6),
    "suppressed": dict(suppress_tokens=[5, 6, 7, 8], begin_suppress_tokens=[9, 10], min_new_tokens=3,
                       forced_bos_token_id=14),
    "ends": dict(eos_token_id=[2, 11, 12], min_length=4),
    "lengths": dict(eos_token_id=[2, 11, 12], min_length=4, min_new_tokens=2),
    "beams": dict(num_beams=3, length_penalty=2.0, early_stopping=True, no_repeat_ngram_size=3),
    "repeated": dict(repetition_penalty=2.5),
    "repeated by beams": dict(num_beams=3, length_penalty=2.0, early_stopping=True, no_repeat_ngram_size=3,
                              repetition_penalty=2.5),
    "words": dict(bad_words_ids=[[1], [19, 19], [22], [2]]),
}  # fmt: skip


def saved(tmp_path, name, settings, in_config=False):
    """Saves a model of transformers with these settings; its weights make it babble."""
    torch = peer("torch")
    transformers = peer("transformers")
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


def theirs(model, source, start=1, **options):
    import torch

    options = {k: torch.tensor(x) if isinstance(x, np.ndarray) else x for k, x in options.items()}
    tokens = model.generate(torch.tensor(source), max_new_tokens=NEW, **options)[:, start:]
    found = np.full((ROWS, NEW), SIZES["pad_token_id"])
    found[:, : tokens.shape[1]] = tokens
    return found


def ours(folder, source, prompts=None, **changes):
    model, params, _ = xa.load(folder)
    options = model.generation(max_new_tokens=NEW, **changes) | {"prefix": prompts}
    run = jax.jit(lambda p: xa.decode.generate(xa.functional.bind(model, p), source, **options))
    return np.asarray(run(params).tokens[:, 0])


@pytest.fixture
def source():
    return np.random.default_rng(0).integers(3, VOCAB, (ROWS, 6))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("in_config", [False, True], ids=["generation_config", "config"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_do_what_they_do_in_transformers(tmp_path, source, kind, in_config):
    name = "marian" if kind == "words" else "bart"
    model = saved(tmp_path, name, SETTINGS[kind], in_config)
    expected = theirs(model, source)
    np.testing.assert_array_equal(ours(tmp_path, source), expected)
    model.generation_config = type(model.generation_config)(**IDS)
    assert not np.array_equal(theirs(model, source), expected)  # the settings mattered


@pytest.mark.filterwarnings("ignore")
def test_changes_are_those_of_generate(tmp_path, source):
    model = saved(tmp_path, "bart", SETTINGS["beams"] | SETTINGS["forced"])
    changes = dict(num_beams=1, forced_bos_token_id=9, decoder_start_token_id=3, min_length=0)
    np.testing.assert_array_equal(
        ours(tmp_path, source, **changes), theirs(model, source, **changes)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beams", [1, 3])
def test_first_tokens_are_suppressed_behind_a_prompt_of_several(tmp_path, source, beams):
    """Nothing is forced there: a token is forced behind a start of one token only."""
    settings = dict(begin_suppress_tokens=list(range(3, 14)), forced_bos_token_id=14)
    model = saved(tmp_path, "bart", settings)
    rest = np.random.default_rng(1).integers(3, VOCAB, (ROWS, 2))
    prompts = np.concatenate([np.full((ROWS, 1), IDS["decoder_start_token_id"]), rest], axis=1)
    expected = theirs(model, source, 3, decoder_input_ids=prompts, num_beams=beams)
    assert (
        len(np.unique(expected, axis=0)) > ROWS / 2
        and not np.isin(expected[:, 0], [2, *range(3, 14)]).any()
    )
    np.testing.assert_array_equal(ours(tmp_path, source, prompts, num_beams=beams), expected)


@pytest.mark.filterwarnings("ignore")
def test_draws_are_from_the_distribution_of_transformers(tmp_path, source):
    draws = dict(do_sample=True, temperature=0.7, top_k=9, top_p=0.9, min_p=0.02)
    theirs = saved(tmp_path, "bart", draws | SETTINGS["repeated"])
    torch = peer("torch")
    torch.manual_seed(1)
    found = dict(output_scores=True, return_dict_in_generate=True)
    drawn = theirs.generate(torch.tensor(source), max_new_tokens=NEW, **found)
    tokens, scores = drawn.sequences.numpy(), torch.stack(drawn.scores, 1).numpy()

    model, params, _ = xa.load(tmp_path)
    options = model.generation(max_new_tokens=NEW, key=jax.random.key(0))
    logits = xa.apply(model, params, jnp.asarray(source), jnp.asarray(tokens[:, :-1]))
    for step in range(tokens.shape[1] - 1):
        given = jnp.asarray(tokens)[:, None], jnp.int32(step + 1), 1
        own = processors.apply(options["processors"], logits[:, None, step], *given)[:, 0]
        going = ~(tokens[:, 1 : step + 1] == IDS["eos_token_id"]).any(1)
        expected = jax.nn.softmax(scores[going, step])
        assert 1 < np.median((expected > 0).sum(1)) < 9
        np.testing.assert_allclose(jax.nn.softmax(own[going]), expected, atol=1e-4)


def test_draws_are_of_the_best_fifty_where_nothing_else_is_said():
    """As in transformers, which says so nowhere in the file."""
    draws = described(vocab_size=60, do_sample=True)
    for changes, count in ((dict(), 50), (dict(top_k=0), 60)):
        options = draws.generation(max_new_tokens=5, key=jax.random.key(0), **changes)
        given = jnp.zeros((1, 1, 4), int), jnp.int32(1), 1
        left = processors.apply(options["processors"], jnp.arange(60.0)[None, None], *given)
        assert np.isfinite(left).sum() == count


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "repeated", [dict(no_repeat_ngram_size=1), dict(repetition_penalty=3.0)], ids=str
)
@pytest.mark.parametrize("beams", [1, 3])
def test_padding_left_of_a_prompt_counts_as_in_transformers(tmp_path, beams, repeated):
    torch = peer("torch")
    transformers = peer("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=24)
    ids = dict(bos_token_id=0, eos_token_id=list(range(2, 8)), pad_token_id=1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.5)
    settings = dict(min_length=8, forced_bos_token_id=9, begin_suppress_tokens=list(range(10, 17)))
    model.generation_config = transformers.GenerationConfig(**ids, **settings, **repeated)
    model.save_pretrained(tmp_path)
    random = np.random.default_rng(1)
    lengths, prompts = random.integers(1, 6, ROWS), random.integers(8, VOCAB, (ROWS, 5))
    present = np.arange(5) >= 5 - lengths[:, None]
    prompts = np.where(present, prompts, ids["pad_token_id"])
    expected = theirs(model, prompts, 5, attention_mask=present.astype(int), num_beams=beams)
    assert len(set((expected != 1).sum(1))) >= 3

    loaded, params, _ = xa.load(tmp_path)
    options = loaded.generation(max_new_tokens=NEW, num_beams=beams)
    options |= dict(batch=ROWS, prefix=prompts, prefix_lengths=lengths)
    run = jax.jit(lambda p: xa.decode.generate(xa.functional.bind(loaded, p), **options))
    np.testing.assert_array_equal(run(params).tokens[:, 0], expected)


@pytest.mark.filterwarnings("ignore")
def test_ids_that_the_settings_leave_open_are_open_in_transformers_too(tmp_path, source):
    """Without an end texts run on; without padding, the first end pads; config.json is not asked."""
    saved(tmp_path, "bart", {})
    from transformers import BartForConditionalGeneration

    for left in ({"bos_token_id": 5}, {"decoder_start_token_id": 2, "eos_token_id": [4, 11]}):
        (tmp_path / "generation_config.json").write_text(json.dumps(left))
        expected = theirs(BartForConditionalGeneration.from_pretrained(tmp_path), source)
        np.testing.assert_array_equal(ours(tmp_path, source), expected)


# Settings that cannot change a text.
HARMLESS = set(
    "max_length max_new_tokens use_cache cache_config max_cache_len output_attentions output_hidden_states "
    "output_scores output_logits return_dict_in_generate num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold max_matching_ngram_size assistant_lookbehind target_lookbehind "
    "compile_config disable_compile continuous_batching_config diversity_penalty prefill_chunk_size "
    "transformers_version".split()
)


def test_every_setting_of_transformers_is_followed_refused_or_harmless():
    transformers = peer("transformers")
    names = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    known = {*generation._SUPPORTED, *generation._IDS, *generation._UNSUPPORTED}
    known |= generation._UNSUPPORTED_DRAWS.keys()
    assert names - known - HARMLESS == set()
    assert known & HARMLESS == set()


def described(**settings):
    return xa.weights.describe(checkpoints.BART | settings)


def with_settings(**settings):
    return dataclasses.replace(described(), generation_text=json.dumps(settings))


def test_ids_have_all_the_ends_and_nothing_that_the_settings_leave_open():
    assert described(eos_token_id=[2, 4]).ids == {"bos_id": 2, "eos_id": (2, 4), "pad_id": 1}
    assert described(eos_token_id=[2]).ids["eos_id"] == 2
    model = with_settings(pad_token_id=None, eos_token_id=5, bos_token_id=4)
    assert model.ids == {"bos_id": 4, "eos_id": 5, "pad_id": 5}
    assert with_settings(bos_token_id=4).ids == {"bos_id": 4, "eos_id": (), "pad_id": 0}
    with pytest.raises(CheckpointError, match="lacks decoder_start_token_id and bos_token_id"):
        _ = with_settings().ids


def test_ids_that_the_caller_gives_are_not_asked_for():
    given = dict(decoder_start_token_id=3, eos_token_id=[4, 5], pad_token_id=6)
    found = with_settings().generation(max_new_tokens=5, **given)
    assert found == {
        "bos_id": 3, "eos_id": (4, 5), "pad_id": 6, "max_new_tokens": 5, "processors": (),
    }  # fmt: skip
    found = xa.weights.describe(checkpoints.GPT2).generation(max_new_tokens=5, bos_token_id=7)
    assert found["bos_id"] == 7


def test_labels_are_shifted_by_the_ids_of_the_config():
    model = with_settings(decoder_start_token_id=7, pad_token_id=8, eos_token_id=2)
    labels = np.array([[5, 6, -100, -100]])
    assert model.target_in(labels).tolist() == [[2, 5, 6, 1]]
    config = {key: x for key, x in checkpoints.BART.items() if key != "decoder_start_token_id"}
    with pytest.raises(CheckpointError, match="lacks decoder_start_token_id; shift the labels by"):
        xa.weights.describe(config).target_in(labels)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(num_beams=0), "num_beams is 0; expected 1"),
        (dict(early_stopping="soon"), "early_stopping is 'soon'; expected True"),
        (dict(bad_words_ids=[[3], [4, 20]]), "bad_words_ids has the token 20; expected 0 to 19"),
        (dict(bad_words_ids=[[-1, 4]]), "bad_words_ids has the token -1"),
        (dict(forced_bos_token_id=20), "forced_bos_token_id has the token 20"),
        (dict(forced_eos_token_id=[2, 31]), "forced_eos_token_id has the token 31"),
        (dict(decoder_start_token_id=20), "decoder_start_token_id has the token 20"),
        (dict(decoder_start_token_id=[2, 3]), "expected one token. .* prefix="),
        (dict(forced_bos_token_id=5, suppress_tokens=[4, 5]), "which suppress_tokens forbids"),
        (dict(num_beams=2, forced_eos_token_id=[2, 3]), "worth the same"),
        (dict(suppress_tokens="x"), "suppress_tokens is 'x'; expected a list of tokens"),
        (dict(bad_words_ids=[3]), r"bad_words_ids is \[3\]; expected lists of tokens"),
        (dict(eos_token_id="x"), "eos_token_id is 'x'; expected a token or several"),
        (dict(length_penalty=float("nan")), "length_penalty is nan; expected a number"),
        (dict(temperature=0.0), "temperature is 0.0; expected a number above 0"),
        (dict(top_p=1.5), "top_p is 1.5; expected a number above 0, at most 1"),
        (dict(do_sample=True), "ask for draws; give generation.*key="),
        (dict(do_sample=True, num_beams=2), "draws beams, which is not supported"),
        (dict(do_sample=True, typical_p=0.5), "typical_p 0.5, which is not supported"),
        (dict(num_return_sequences=2), "is 2, and a search of num_beams 1 finds 1 a row"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(settings, words):
    for model, changes in ((described(**settings), {}), (described(), settings)):
        with pytest.raises(CheckpointError, match=words):
            model.generation(max_new_tokens=5, **changes)


def test_one_of_several_forced_ends_is_the_lowest():
    """To greedy decoding all are worth the same; the first of the best is taken, as in transformers."""
    [force] = described(forced_eos_token_id=[9, 4]).generation(max_new_tokens=3)["processors"]
    context = Context(jnp.zeros(4, jnp.int32), jnp.int32(3), 1, jnp.int32(0))
    assert int(force(jnp.zeros(8), context).argmax()) == 4


def test_the_least_length_counts_the_padding_before_a_prompt():
    model = described(min_length=5)
    [ban] = model.generation(max_new_tokens=5)["processors"]
    tokens = jnp.zeros(9, jnp.int32)
    for padding, banned in ((1, True), (2, False)):
        context = Context(tokens, jnp.int32(3), 2, jnp.int32(0), padding)
        assert np.isinf(ban(jnp.zeros(8), context)[2]) == banned


@pytest.mark.parametrize(
    "settings, neutral",
    [
        (dict(encoder_repetition_penalty=1.2), "encoder_repetition_penalty=1.0"),
        (dict(encoder_no_repeat_ngram_size=3), "encoder_no_repeat_ngram_size=0"),
        (dict(watermarking_config={"bias": 2.5}), "watermarking_config=None"),
        (dict(token_healing=True), "token_healing=False"),
        (dict(cache_implementation="quantized"), "cache_implementation='dynamic'"),
        (dict(forced_decoder_ids=[[1, 4]]), "forced_decoder_ids=None"),
    ],
)
def test_what_is_not_done_is_refused_with_the_way_round_it(settings, neutral):
    model = described(**settings)
    with pytest.raises(CheckpointError, match="not supported; generation.*") as raised:
        model.generation(max_new_tokens=5)
    assert neutral in str(raised.value)
    name, _, value = neutral.partition("=")
    neutral = ast.literal_eval(value)
    assert model.generation(max_new_tokens=5, **{name: neutral})["processors"] == ()


def test_an_unknown_change_is_refused():
    with pytest.raises(ValueError, match="got num_beam; expected some of num_beams"):
        described().generation(max_new_tokens=5, num_beam=3)
    with pytest.raises(ValueError, match="got a key, and do_sample is False"):
        described().generation(max_new_tokens=5, key=jax.random.key(0))


def test_the_pair_asks_for_what_its_decoder_does():
    writes = dict(is_decoder=True, add_cross_attention=True, bos_token_id=3, eos_token_id=4)
    writer = checkpoints.BERT | writes | dict(suppress_tokens=[5])
    pair = dict(model_type="encoder-decoder", encoder=checkpoints.BERT, decoder=writer)
    [ban] = xa.weights.describe(pair).generation(max_new_tokens=5)["processors"]
    context = Context(jnp.zeros(4, jnp.int32), jnp.int32(1), 1, jnp.int32(0))
    assert np.isinf(ban(jnp.zeros(8), context)).tolist() == [False] * 5 + [True] + [False] * 2
