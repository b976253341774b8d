"""Settings of generation, drawn: the texts that ``transformers`` writes, or a refusal that names one."""

import json
import warnings

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossattn as xa
from experiments.parity import cases, reference
from experiments.parity.cases import BOS, EOS, PAD, VOCAB
from tests.peers import peer
from tests.properties import examples, generators

LENGTH, ROWS = 8, 4
words = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=3)

# Where a model lacks a setting, transformers says so or does nothing.
COMMON = {
    "num_beams": st.integers(0, 4),
    "length_penalty": st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    "early_stopping": st.sampled_from([False, True, "never"]),
    "no_repeat_ngram_size": st.integers(0, 3),
    "bad_words_ids": st.lists(words, min_size=1, max_size=3),
    "min_length": st.integers(0, 7),
    "min_new_tokens": st.integers(0, 6),
    "forced_bos_token_id": st.integers(3, VOCAB - 1),
    "forced_eos_token_id": st.sampled_from([EOS, [EOS], [EOS, 7]]),
    "suppress_tokens": words,
    "begin_suppress_tokens": words,
    "eos_token_id": st.integers(3, VOCAB - 1).map(lambda other: [EOS, other]) | st.just(EOS),
    "decoder_start_token_id": st.sampled_from([PAD, BOS, EOS, 9]),
}
RARE = {
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "renormalize_logits": st.booleans(),
    "exponential_decay_length_penalty": st.just((3, 1.5)),
    "sequence_bias": words.map(lambda words: [[words, 1.5]]),
    "encoder_no_repeat_ngram_size": st.just(2),
    "encoder_repetition_penalty": st.just(1.4),
    "guidance_scale": st.sampled_from([1.0, 1.7]),
    "num_beam_groups": st.sampled_from([1, 2]),
    "penalty_alpha": st.sampled_from([0.0, 0.6]),
    "force_words_ids": words.map(lambda words: [words]),
    "max_time": st.just(1e-9),
    "watermarking_config": st.just({"bias": 5.0, "greenlist_ratio": 0.25}),
    "stop_strings": st.just(["a"]),
    "dola_layers": st.just("low"),
    "token_healing": st.just(True),
    "constraints": words.map(lambda words: [{"token_ids": words}]),
    "top_k": st.sampled_from([1, 5]),
    "temperature": st.sampled_from([0.5, 2.0]),
    "typical_p": st.just(0.5),
}
# The turns of dynamic positions depend on how many tokens a call reads: all of a prompt there, all but its
# last here.
KINDS = [
    c for c in cases.CASES
    if c.search and c.kind in ("pair", "decoder") and not c.reads and not c.name.endswith(", dynamic")
]  # fmt: skip


@st.composite
def settings(draw):
    names = draw(st.lists(st.sampled_from(sorted(COMMON)), min_size=1, max_size=3, unique=True))
    names += draw(st.lists(st.sampled_from(sorted(RARE)), max_size=1))
    return {name: draw((COMMON | RARE)[name]) for name in sorted(names)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(a model of transformers, its folder), made when it is first drawn."""
    peer("torch"), peer("transformers")
    folder, models = tmp_path_factory.mktemp("models"), {}

    def get(kind):
        if kind.name not in models:
            models[kind.name] = reference.build(kind, folder / kind.name)
        return models[kind.name], folder / kind.name

    return get


@examples(12)
@given(kind=st.sampled_from(KINDS), chosen=settings(), random=generators, size=st.integers(1, 6))
def test_texts_are_those_of_transformers_or_a_setting_is_refused_by_name(
    made, in_production, kind, chosen, random, size
):
    model, folder = made(kind)
    inputs = drawn_inputs(random, size, kind.kind == "decoder")
    theirs = texts_of_transformers(kind, model, chosen, inputs)
    try:
        ours = our_texts(kind, folder, model.config, chosen, inputs)
    except (ValueError, NotImplementedError) as refusal:
        # Refused by name; one that transformers refuses as well may be refused in any words.
        assert theirs is None or any(name in str(refusal) for name in chosen), refusal
        return
    if theirs is not None:
        ends = np.ravel(chosen.get("eos_token_id", EOS)).tolist()
        assert up_to(ends, ours) == up_to(ends, theirs)


def drawn_inputs(random, size, prompts):
    """Tokens and where they are; sources end in padding, prompts begin with it."""
    tokens, lengths = (
        random.integers(3, VOCAB, (ROWS, size)),
        random.integers(1, size + 1, (ROWS, 1)),
    )
    lengths[random.integers(ROWS)] = size  # else all rows have padding that only one side counts
    there = np.arange(size) < lengths
    there = there[:, ::-1] if prompts else there
    return np.where(there, tokens, PAD), there.astype(np.int64)


def texts_of_transformers(kind, model, chosen, inputs):
    """Generated tokens, without those they began with; None where transformers itself refuses."""
    import torch
    from transformers import GenerationConfig

    tokens, there = (torch.from_numpy(x) for x in inputs)
    first = getattr(model.config, "decoder_start_token_id", None)
    ids = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=first)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = GenerationConfig(**{**ids, **chosen}, max_new_tokens=LENGTH, do_sample=False)
            written = model.generate(tokens, attention_mask=there, generation_config=config)
    except Exception:  # of any kind: a call that it does not take is no measure
        return None
    return written[:, tokens.shape[1] if kind.kind == "decoder" else 1 :].numpy()


def our_texts(kind, folder, config, chosen, inputs):
    """Returns the same by this library, whose settings come from the file."""
    ids = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    if (first := getattr(config, "decoder_start_token_id", None)) is not None:
        ids["decoder_start_token_id"] = first
    (folder / "generation_config.json").write_text(json.dumps({**ids, **chosen}))
    model, params, _ = xa.load(folder)
    options, (tokens, there) = model.generation(max_new_tokens=LENGTH), inputs
    arrays = tuple(x.astype(np.int32) for x in inputs)
    if kind.kind == "decoder":
        prompts = [row[place > 0].tolist() for row, place in zip(tokens, there, strict=True)]
        options |= {"prefix": prompts, "batch": ROWS}
        arrays = ()
    run = lambda params: xa.decode.generate(  # noqa: E731
        xa.functional.bind(model, params), *arrays, **options
    )
    return np.asarray(jax.jit(run)(params).tokens[:, 0])


def up_to(ends, tokens):
    """Each row up to its first end, that included."""
    rows = np.asarray(tokens).tolist()
    stops = [next((i + 1 for i, x in enumerate(row) if x in ends), len(row)) for row in rows]
    return [row[:stop] for row, stop in zip(rows, stops, strict=True)]
