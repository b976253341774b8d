"""The conformance suite of models: a sound model keeps every promise, and no mutant of it outlives the suite.

The model is an encoder-decoder in float64 numpy, written here without code of the library. A mutant overrides
one method, and the test names the promise that it must break.
"""

import dataclasses
import functools
import inspect

import numpy as np
import pytest

from crossattn.testing import models

VOCAB, D = 24, 12


class Translator:
    """Source and target in, logits out: one layer each, a cache of the decoder's inputs."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.table = rng.normal(size=(VOCAB, D))
        names = ("encoder", "itself", "cross", "second")
        self.kernels = {name: rng.normal(size=(4, D, D)) / D**0.5 for name in names}

    def embed(self, tokens, positions):
        angles = positions[..., None] / 20 ** (np.arange(D // 2) / (D // 2))
        return self.table[tokens] + np.concatenate([np.sin(angles), np.cos(angles)], -1)

    def softmax(self, logits, allowed):
        logits = np.where(allowed, logits, -np.inf)
        peak = logits.max(-1, keepdims=True)
        powers = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
        return powers / np.maximum(powers.sum(-1, keepdims=True), 1e-30)

    def attend(self, name, x, memory, allowed):
        query, key, value, out = self.kernels[name]
        logits = (x @ query) @ np.swapaxes(memory @ key, -1, -2) / D**0.5
        return np.tanh(x + self.softmax(logits, allowed) @ (memory @ value) @ out)

    def encoder_mask(self, ids):
        return (ids[:, :, None] == ids[:, None]) & (ids[:, None] > 0)

    def causal(self, queries, keys):
        return keys[None] <= queries[:, None]

    def self_mask(self, ids):
        places = np.arange(ids.shape[1])
        return self.causal(places, places) & (ids[:, :, None] == ids[:, None])

    def cross_mask(self, ids, source_ids):
        return (ids[:, :, None] == source_ids[:, None]) & (source_ids[:, None] > 0)

    def encode(self, source, ids, positions):
        x = self.embed(source, positions)
        return self.attend("encoder", x, x, self.encoder_mask(ids))

    def decode(self, x, keys, memory, mask, cross):
        y = self.attend("itself", x, keys, mask)
        y = self.attend("cross", y, memory, cross)
        return y @ self.table.T

    def styled(self, memory, style):
        return memory + style[:, None]

    def call(self, source, target, style, source_segments=None, source_positions=None,
             target_segments=None, target_positions=None):  # fmt: skip
        memory = self.encode(source, *placed(source, source_segments, source_positions))
        memory = self.styled(memory, style)
        ids, positions = placed(target, target_segments, target_positions)
        source_ids, _ = placed(source, source_segments, None)
        x = self.embed(target, positions)
        return self.decode(x, x, memory, self.self_mask(ids), self.cross_mask(ids, source_ids))

    def begin(self, source, style, source_segments, padding=None):
        memory = self.encode(source, *placed(source, source_segments, None))
        memory = self.styled(memory, style)
        padding = np.zeros(len(source), int) if padding is None else padding
        return memory, source_segments, padding, np.zeros((len(source), 0, D))

    def step_positions(self, places, padding):
        return np.maximum(places - padding[:, None], 0)

    def step_mask(self, queries, keys, padding):
        return self.causal(queries, keys) & (keys >= padding[:, None])[:, None]

    def step(self, target, state):
        memory, source_ids, padding, cache = state
        read, end = cache.shape[1], cache.shape[1] + target.shape[1]
        x = self.embed(target, self.step_positions(np.arange(read, end), padding))
        cache = np.concatenate([cache, x], axis=1)
        mask = self.step_mask(np.arange(read, end), np.arange(end), padding)
        cross = self.cross_mask(np.ones(target.shape, int), source_ids)
        return self.decode(x, cache, memory, mask, cross), (memory, source_ids, padding, cache)


def placed(tokens, ids, positions):
    ids = np.ones(tokens.shape, int) if ids is None else ids
    arange = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return ids, arange if positions is None else positions


def adapter(model):
    texts = models.texts(source=(7, VOCAB), target=(6, VOCAB))
    draw = lambda rows: texts(rows) | {"style": np.random.default_rng(1).normal(size=(rows, D))}  # noqa: E731
    takes, begins = (inspect.signature(f).parameters for f in (Translator.call, Translator.begin))
    return models.Model(model.call, draw, model.begin, model.step, takes=takes, begins=begins)


@functools.cache
def broken(make):
    """(promise, case) of what a model breaks."""
    found = models.conformance(adapter(make()))
    return {(f.promise, f.case) for f in found if f.kind == "broken"}


class NeverMasked(Translator):
    """As a T5 decoder of TransformerLens was."""

    def causal(self, queries, keys):
        return np.ones((len(queries), len(keys)), bool)


class ReadsTheNext(Translator):
    def causal(self, queries, keys):
        return keys[None] <= queries[:, None] + 1


class PaddingReplacesCausality(Translator):
    def self_mask(self, ids):
        return super().self_mask(ids) if ids.all() else ids[:, None] * ids[:, :, None] > 0


class EncoderReadsPadding(Translator):
    def encoder_mask(self, ids):
        return np.ones((*ids.shape, ids.shape[1]), bool)


class CrossAttentionReadsPadding(Translator):
    def cross_mask(self, ids, source_ids):
        return super().cross_mask(ids, np.maximum(source_ids, 1))


class TargetReadsPadding(Translator):
    def self_mask(self, ids):
        return super().self_mask(np.maximum(ids, 1))


class MaskIsFaint(Translator):
    def softmax(self, logits, allowed):
        return super().softmax(np.where(allowed, logits, -6), np.ones_like(allowed))


class NothingIsNaN(Translator):
    def softmax(self, logits, allowed):
        powers = np.exp(np.where(allowed, logits, -np.inf))
        with np.errstate(invalid="ignore"):
            return powers / powers.sum(-1, keepdims=True)


class OneMaskForAllRows(Translator):
    def cross_mask(self, ids, source_ids):
        return super().cross_mask(ids, source_ids[:1])


class PositionsCountPadding(Translator):
    def call(self, *, target_positions=None, **given):
        return super().call(**given)


class PositionsRunOn(Translator):
    def call(self, *, source_positions=None, **given):
        return super().call(**given)


class NormOfTheBatch(Translator):
    def decode(self, x, *rest):
        return super().decode(x - x.mean(0), *rest)


class RowsSwapped(Translator):
    def encode(self, source, ids, positions):
        return super().encode(source[::-1], ids[::-1], positions[::-1])


class DropoutLeftOn(Translator):
    rng = np.random.default_rng(0)

    def embed(self, tokens, positions):
        x = super().embed(tokens, positions)
        return x * (self.rng.random(x.shape) > 0.1)


class RemembersTheLastCall(Translator):
    last = 0.0

    def encode(self, source, ids, positions):
        memory = super().encode(source, ids, positions)
        self.last, before = memory.mean(), self.last
        return memory + before


class ReadsNoSource(Translator):
    def cross_mask(self, ids, source_ids):
        return np.zeros((*ids.shape, source_ids.shape[1]), bool)


class ReadsNoStyle(Translator):
    def styled(self, memory, style):
        return memory


class LosesTheLastOfTheSource(Translator):
    def encode(self, source, ids, positions):
        memory = super().encode(source[:, :-1], ids[:, :-1], positions[:, :-1])
        return np.pad(memory, [(0, 0), (0, 1), (0, 0)])


class EachReadsItself(Translator):
    def causal(self, queries, keys):
        return keys[None] == queries[:, None]


class StepsOneTooFar(Translator):
    def step_positions(self, places, padding):
        return super().step_positions(places + 1, padding)


class ChunksUnmasked(Translator):
    def step_mask(self, queries, keys, padding):
        return super().step_mask(np.full_like(queries, queries[-1]), keys, padding)


class StaleSource(Translator):
    first = None

    def begin(self, *given, **more):
        state = super().begin(*given, **more)
        self.first = state[0] if self.first is None else self.first
        return self.first, *state[1:]


class OneCacheForAll(Translator):
    cache = None

    def begin(self, *given, **more):
        self.cache = None
        return super().begin(*given, **more)

    def step(self, target, state):
        cache = state[3] if self.cache is None else self.cache
        out, state = super().step(target, (*state[:3], cache))
        self.cache = state[3]
        return out, state


class StepsForgetTheMaskOfTheSource(Translator):
    def begin(self, source, style, source_segments, padding=None):
        return super().begin(source, style, np.ones_like(source_segments), padding)


class CacheForgets(Translator):
    def step_mask(self, queries, keys, padding):
        return super().step_mask(queries, keys, padding) & (keys > queries[:, None] - 4)


class StepsReadPadding(Translator):
    def step_mask(self, queries, keys, padding):
        return super().step_mask(queries, keys, np.zeros_like(padding))


class StepsCountPadding(Translator):
    def step_positions(self, places, padding):
        return super().step_positions(places, np.zeros_like(padding))


class EncoderReadsOtherTexts(Translator):
    def encoder_mask(self, ids):
        return super().encoder_mask(np.minimum(ids, 1))


class TargetReadsOtherTexts(Translator):
    def self_mask(self, ids):
        return super().self_mask(np.minimum(ids, 1))


class CrossAttentionReadsOtherTexts(Translator):
    def cross_mask(self, ids, source_ids):
        return super().cross_mask(np.minimum(ids, 1), np.minimum(source_ids, 1))


MUTANTS = {
    DropoutLeftOn: "same again",
    RemembersTheLastCall: "same again",
    ReadsNoSource: "reads what it may",
    ReadsNoStyle: "reads what it may",
    LosesTheLastOfTheSource: "reads what it may",
    EachReadsItself: "reads what it may",
    NeverMasked: "no leakage",
    ReadsTheNext: "no leakage",
    PaddingReplacesCausality: "padding",
    EncoderReadsPadding: "padding",
    CrossAttentionReadsPadding: "padding",
    TargetReadsPadding: "padding",
    MaskIsFaint: "padding",
    NothingIsNaN: "padding",
    OneMaskForAllRows: "padding",
    PositionsCountPadding: "padding",
    NormOfTheBatch: "a batch equals its rows",
    RowsSwapped: "a batch equals its rows",
    StepsOneTooFar: "cached equals whole",
    ChunksUnmasked: "cached equals whole",
    StaleSource: "cached equals whole",
    OneCacheForAll: "cached equals whole",
    StepsForgetTheMaskOfTheSource: "cached equals whole",
    CacheForgets: "cached equals whole",
    StepsReadPadding: "cached equals whole",
    StepsCountPadding: "cached equals whole",
    PositionsRunOn: "packed equals alone",
    EncoderReadsOtherTexts: "packed equals alone",
    TargetReadsOtherTexts: "packed equals alone",
    CrossAttentionReadsOtherTexts: "packed equals alone",
}
CASES = {(promise, case) for promise, case, _ in models.items()}


def test_a_sound_model_keeps_every_promise():
    found = models.conformance(adapter(Translator()))
    assert {(f.promise, f.case) for f in found} == CASES
    assert {f.outcome for f in found} == {"kept"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_no_mutant_outlives_the_suite(mutant):
    """Each breaks the promise that names its fault."""
    assert MUTANTS[mutant] in {promise for promise, _ in broken(mutant)}


def test_every_case_finds_a_mutant():
    assert set().union(*map(broken, MUTANTS)) == CASES


def test_weights_too_small_to_show_anything_are_said_to_be():
    """A model whose attention is next to nothing would seem to leak nothing."""
    faint = NeverMasked()
    faint.kernels = {name: 1e-6 * x for name, x in faint.kernels.items()}
    found = models.conformance(adapter(faint), promises=["reads what it may"])
    assert {f.case: f.kind for f in found} == dict.fromkeys(
        ("target", "source", "the rest"), "broken"
    )
    assert "moves no output by more than" in found[0].outcome


def test_what_an_adapter_lacks_is_not_offered_and_never_kept():
    model = Translator()
    less = dataclasses.replace(adapter(model), takes=("source", "target", "style"), begin=None)
    found = models.conformance(less)
    said = {(f.promise, f.case): f.outcome for f in found if f.kind != "kept"}
    assert said["padding", "unequal lengths"] == "not offered: it takes no mask"
    assert said["padding", "on the left"] == "not offered: it takes no mask of the target"
    assert said["cached equals whole", "one by one"] == "not offered: it has no steps"
    lacks = "not offered: it takes no segments of the source and the target"
    assert said["packed equals alone", "first"] == lacks
    assert {promise for promise, _ in said} == {
        "padding",
        "cached equals whole",
        "packed equals alone",
    }


def test_an_encoder_leaks_nothing_as_there_is_nothing_later():
    encoder = dataclasses.replace(adapter(NeverMasked()), causal=False, begin=None)
    found = models.conformance(encoder, promises=["no leakage", "cached equals whole"])
    assert {f.outcome for f in found} == {"not applicable: it generates nothing"}


def test_refusals_and_other_errors_are_told_apart():
    def steps(target, state):
        raise NotImplementedError("one token at a time")

    def fails(target, state):
        raise KeyError("cache")

    outcomes = [
        {f.outcome for f in models.conformance(dataclasses.replace(adapter(Translator()), step=step),
                                               promises=["cached equals whole"])}
        for step in (steps, fails)
    ]  # fmt: skip
    assert outcomes == [{"refused: one token at a time"}, {"broken: KeyError: 'cache'"}]


def test_an_unknown_promise_is_refused():
    with pytest.raises(ValueError, match=r"promises has \['speed'\]; expected some of same again"):
        models.conformance(adapter(Translator()), promises=["speed"])
