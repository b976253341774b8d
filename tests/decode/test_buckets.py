"""Bucketed: one compile a bucket, counted; the same output as without; a stream of the same tokens."""

import contextlib
import functools

import jax
import numpy as np
import pytest

from crossattn.decode import (
    Bucketed,
    Capture,
    constraints,
    generate,
    sampling,
)
from tests.closeness import close

from .translators import LENGTH, SEGMENTS, SOURCE, bound, language_model, translator

BUILD, PARAMS = translator(decoder_layers=1)
SIZES = dict(batch_sizes=(2, 4), source_lengths=(8, 16), target_lengths=(8,))
PROMPTS = [[1, 5, 9, 4, 12], [1, 7], [1, 3, 8]]


STEERING = [sampling.repetition_penalty(1.2)]


@contextlib.contextmanager
def compilations():
    """A list that grows by one with each program that XLA compiles."""
    names = []

    def heard(name, *unused, **also_unused):
        if name == "/jax/core/compile/backend_compile_duration":
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def sources(rows, length, seed=0):
    return np.random.default_rng(seed).integers(3, 16, (rows, length)).astype(np.int32)


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_one_program_is_compiled_for_each_bucket_of_lengths(options):
    run = Bucketed(BUILD, **{**SIZES, "target_lengths": (4, 8)}, **options)
    shapes = [(3, 5, 7), (4, 8, 8), (3, 6, 5), (1, 7, 8), (2, 3, 5), (4, 9, 8), (3, 16, 6)]
    shapes += [(3, 7, 4), (4, 4, 1), (4, 8, 3)]
    with compilations() as compiled:
        for B, S, T in shapes:
            found = run(PARAMS, sources(B, S), max_new_tokens=T)
            assert found.tokens.shape == (B, options.get("num_beams", 1), T)
    # Those of (rows, sources, targets) 4 8 8, 2 8 8, 4 16 8 and 4 8 4.
    assert len(compiled) == 4
    with compilations() as compiled:
        for seed, (B, S, T) in enumerate(shapes):
            run(PARAMS, sources(B, S, seed), max_new_tokens=T)
    assert compiled == []


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3, "prefix": (1, 5)}, {"candidates": 2}, {"capture": Capture((0,))}],
    ids=["beams, prefix", "contrastive", "captured"],
)
def test_filling_up_changes_nothing(options):
    found = jax.device_get(
        Bucketed(BUILD, **SIZES, **options)(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH)
    )
    plain = jax.jit(
        lambda p: generate(bound((BUILD, p)), SOURCE, SEGMENTS, max_new_tokens=LENGTH, **options)
    )(PARAMS)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)


def test_lengths_beyond_the_largest_size_are_its_multiples():
    run = Bucketed(BUILD, batch_sizes=(2,), source_lengths=(4,), target_lengths=(2,))
    with compilations() as compiled:
        found = run(PARAMS, sources(3, 6), max_new_tokens=3)
        run(PARAMS, sources(4, 8), max_new_tokens=4)
    assert found.tokens.shape == (3, 1, 3) and len(compiled) == 1


@functools.cache
def steered():
    """Compiled once for every way to stream."""
    return Bucketed(BUILD, **SIZES, processors=[constraints.ban(5), sampling.temperature(0.9)])


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_a_stream_gives_the_same_tokens_piece_by_piece(every, drawn):
    run, key = steered(), jax.random.key(0) if drawn else None
    whole = run(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH, key=key)
    pieces = list(run.stream(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH, key=key, every=every))
    longest = int(whole.lengths.max())
    assert [p.shape[1] for p in pieces[:-1]] == [every] * (len(pieces) - 1)
    tokens = np.concatenate(pieces, axis=1)
    assert tokens.shape == (3, longest)
    np.testing.assert_array_equal(tokens, whole.tokens[:, 0, :longest])


@pytest.mark.slow
def test_rows_with_keys_of_their_own_are_drawn_as_alone():
    """Neither the bucket nor the longer prompts beside it change what is drawn after a prompt."""
    pair = language_model()
    run = Bucketed(pair[0], batch_sizes=(4,), source_lengths=(8,), target_lengths=(8,))
    keys, call = jax.random.split(jax.random.key(2), 3), dict(max_new_tokens=6)
    found = run(pair[1], prompts=PROMPTS, key=keys, **call)
    streamed = np.concatenate(list(run.stream(pair[1], prompts=PROMPTS, key=keys, **call)), 1)
    np.testing.assert_array_equal(streamed, found.tokens[:, 0, : streamed.shape[1]])
    for row, prompt in enumerate(PROMPTS):
        alone = generate(bound(pair), prefix=[prompt], batch=1, key=keys[row : row + 1], **call)
        np.testing.assert_array_equal(alone.tokens[0], found.tokens[row])


def test_a_stream_compiles_two_programs_and_no_more():
    run = Bucketed(BUILD, **SIZES)
    with compilations() as compiled:
        list(run.stream(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH))
    assert len(compiled) >= 2
    with compilations() as compiled:
        list(run.stream(PARAMS, SOURCE[::-1], SEGMENTS[::-1], max_new_tokens=LENGTH - 1, every=2))
    assert compiled == []


def test_a_call_may_limit_its_rows():
    limits = np.array([2, 9, 0])
    run = Bucketed(BUILD, **SIZES, eos_id=15)
    found = run(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH, limits=limits)
    free = run(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH)
    assert found.lengths[:, 0].tolist() == [2, free.lengths[1, 0], 0]
    for row, limit in enumerate(limits):
        np.testing.assert_array_equal(found.tokens[row, 0, :limit], free.tokens[row, 0, :limit])
        assert not found.tokens[row, 0, limit:].any()
    pieces = list(run.stream(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH, limits=limits))
    streamed = np.concatenate(pieces, axis=1)
    np.testing.assert_array_equal(streamed, found.tokens[:, 0, : streamed.shape[1]])
    same = run(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH, limits=3)
    np.testing.assert_array_equal(same.tokens[..., :3], free.tokens[..., :3])
    assert same.lengths.max() == 3
    with pytest.raises(
        ValueError, match=r"limits has shape \(2,\); expected \[\] or \[B\] = \[3\]"
    ):
        run(PARAMS, SOURCE, SEGMENTS, max_new_tokens=LENGTH, limits=[1, 2])


@pytest.mark.parametrize("name", ["limits", "max_new_tokens", "key"])
def test_what_belongs_to_a_call_is_no_option(name):
    with pytest.raises(ValueError, match=f"{name} is an option of Bucketed; give it to each call"):
        Bucketed(BUILD, **{name: 3})


@pytest.mark.parametrize("every", [1, 3])
def test_a_stream_brings_the_attention_of_its_tokens(every):
    run = Bucketed(BUILD, **SIZES, capture=Capture((0,), (1,)), num_beams=1, eos_id=15, pad_id=15)
    options = dict(max_new_tokens=LENGTH, limits=np.array([5, 2, 7]))
    whole = run(PARAMS, SOURCE, SEGMENTS, **options)
    pieces = list(run.stream(PARAMS, SOURCE, SEGMENTS, every=every, **options))
    tokens = np.concatenate([piece[0] for piece in pieces], axis=1)
    weights = np.concatenate([piece[1] for piece in pieces], axis=3)
    longest = int(whole.lengths.max())
    assert weights.shape == (3, 1, 1, longest, 6) and whole.lengths.min() < longest
    np.testing.assert_array_equal(tokens, whole.tokens[:, 0, :longest])
    close(weights, whole.weights[:, 0, ..., :longest, :])


def test_prompts_are_bucketed_too():
    build, params = language_model(layers=1)
    run = Bucketed(
        build, batch_sizes=(4,), source_lengths=(4, 8), target_lengths=(8,), processors=STEERING
    )
    call = jax.jit(
        lambda p: generate(
            bound((build, p)), batch=3, prefix=PROMPTS, max_new_tokens=LENGTH, processors=STEERING
        )
    )
    plain = jax.device_get(call(params))
    with compilations() as compiled:
        found = run(params, prompts=PROMPTS, max_new_tokens=LENGTH)
        again = run(params, prompts=PROMPTS[::-1] + [[6] * 7], max_new_tokens=LENGTH - 1)
    assert len(compiled) == 1
    for name in ("tokens", "lengths"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))
    np.testing.assert_allclose(found.scores, plain.scores, rtol=1e-3)
    np.testing.assert_array_equal(again.tokens[:3], plain.tokens[::-1, :, :-1])
    pieces = list(run.stream(params, prompts=PROMPTS, max_new_tokens=LENGTH, every=2))
    streamed = np.concatenate(pieces, axis=1)
    np.testing.assert_array_equal(streamed, plain.tokens[:, 0, : streamed.shape[1]])
    assert streamed.shape[1] == plain.lengths.max()


def test_prompts_that_cannot_be_are_refused():
    build, params = language_model(layers=1)
    with pytest.raises(ValueError, match="prefix 1 is empty"):
        Bucketed(build, **SIZES)(params, prompts=[[1, 2], []], max_new_tokens=3)
    with pytest.raises(ValueError, match="prefix is an option of this Bucketed"):
        Bucketed(build, prefix=(1, 2))(params, prompts=[[1, 2]], max_new_tokens=3)
    with pytest.raises(ValueError, match="got neither a source nor prompts"):
        Bucketed(build, **SIZES)(params, max_new_tokens=3)


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(ValueError, match="a stream has no num_beams"):
        next(Bucketed(BUILD, num_beams=2, **SIZES).stream(PARAMS, SOURCE, max_new_tokens=3))
    with pytest.raises(ValueError, match="every is 0"):
        next(Bucketed(BUILD, **SIZES).stream(PARAMS, SOURCE, max_new_tokens=3, every=0))
