"""Bucketed: one compile a bucket, counted; the same output as without; a stream of the same tokens."""

import contextlib
import functools

import jax
import numpy as np
import pytest

from crossattn.decode import (
    Bucketed,
    Capture,
    ModelDraft,
    PromptLookup,
    constraints,
    sampling,
    translate,
)

from .translators import LENGTH, SEGMENTS, SOURCE, bound, translator

BUILD, PARAMS = translator(decoder_layers=1)
SIZES = dict(rows=(2, 4), sources=(8, 16), targets=(8,))


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


def test_one_program_is_compiled_for_each_bucket_of_lengths():
    run = Bucketed(BUILD, **SIZES)
    shapes = [(3, 5, 7), (4, 8, 8), (3, 6, 2), (1, 7, 8), (2, 3, 5), (4, 9, 8), (3, 16, 3)]
    buckets = {(2 if B <= 2 else 4, 8 if S <= 8 else 16) for B, S, _ in shapes}
    with compilations() as compiled:
        for B, S, T in shapes:
            run(PARAMS, sources(B, S), max_length=T)
    assert run.compilations == len(buckets) == 3
    searches = len(compiled)
    assert searches == 3
    with compilations() as compiled:
        for seed, (B, S, T) in enumerate(shapes):
            run(PARAMS, sources(B, S, seed), max_length=T)
    assert compiled == []


@pytest.mark.parametrize(
    "options",
    [{"beams": 3, "prefix": (1, 5)}, {"candidates": 2}, {"capture": Capture((0,))}],
    ids=["beams, prefix", "contrastive", "captured"],
)
def test_filling_up_changes_nothing(options):
    found = jax.device_get(
        Bucketed(BUILD, **SIZES, **options)(PARAMS, SOURCE, SEGMENTS, max_length=LENGTH)
    )
    plain = jax.jit(
        lambda p: translate(bound((BUILD, p)), SOURCE, SEGMENTS, max_length=LENGTH, **options)
    )(PARAMS)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)


def test_drafts_are_made_for_each_bucket():
    small_build, small = translator(seed=5, decoder_layers=1)

    def model(source, segments, params):
        made = bound((small_build, params))
        return ModelDraft(
            made.step, functools.partial(made.start, source, segments, 1), lookahead=2
        )

    def lookup(source, segments, params):
        assert segments.shape == source.shape and params is None
        return PromptLookup(source, lookahead=3)

    expected = Bucketed(BUILD, **SIZES)(PARAMS, SOURCE, SEGMENTS, max_length=LENGTH)
    for draft, params in ((model, small), (lookup, None)):
        run = Bucketed(BUILD, **SIZES, draft=draft)
        for rows in (3, 4):
            more = np.resize(SOURCE, (rows, 6)), np.resize(SEGMENTS, (rows, 6))
            found = run(PARAMS, *more, max_length=LENGTH, draft_params=params)
            np.testing.assert_array_equal(found.tokens[:3], expected.tokens)
        assert run.compilations == 1


def test_lengths_beyond_the_largest_size_are_its_multiples():
    run = Bucketed(BUILD, rows=(2,), sources=(4,), targets=(2,))
    found = run(PARAMS, sources(3, 6), max_length=3)
    assert found.tokens.shape == (3, 1, 3)
    run(PARAMS, sources(4, 8), max_length=4)
    assert run.compilations == 1


@functools.cache
def steered():
    """Compiled once for every way to stream."""
    return Bucketed(BUILD, **SIZES, processors=[constraints.ban(5), sampling.temperature(0.9)])


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_a_stream_gives_the_same_tokens_piece_by_piece(every, drawn):
    run, key = steered(), jax.random.key(0) if drawn else None
    whole = run(PARAMS, SOURCE, SEGMENTS, max_length=LENGTH, key=key)
    pieces = list(run.stream(PARAMS, SOURCE, SEGMENTS, max_length=LENGTH, key=key, every=every))
    longest = int(whole.lengths.max())
    assert [p.shape[1] for p in pieces[:-1]] == [every] * (len(pieces) - 1)
    tokens = np.concatenate(pieces, axis=1)
    assert tokens.shape == (3, longest)
    np.testing.assert_array_equal(tokens, whole.tokens[:, 0, :longest])


def test_a_stream_compiles_two_programs_and_no_more():
    run = Bucketed(BUILD, **SIZES)
    with compilations() as compiled:
        list(run.stream(PARAMS, SOURCE, SEGMENTS, max_length=LENGTH))
    assert len(compiled) >= 2
    with compilations() as compiled:
        list(run.stream(PARAMS, SOURCE[::-1], SEGMENTS[::-1], max_length=LENGTH - 1, every=2))
    assert compiled == []


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(ValueError, match="a stream has no beams"):
        next(Bucketed(BUILD, beams=2, **SIZES).stream(PARAMS, SOURCE, max_length=3))
    with pytest.raises(ValueError, match="every is 0"):
        next(Bucketed(BUILD, **SIZES).stream(PARAMS, SOURCE, max_length=3, every=0))
