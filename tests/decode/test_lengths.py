"""Lengths count what was generated, the end included, whatever number padding has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.decode import (
    Capture,
    ModelDraft,
    PromptLookup,
    attention_of,
    beam_search,
    constraints,
    generate,
    greedy,
    sample,
    speculative,
)

from .markov import EOS, Markov
from .translators import LENGTH, SEGMENTS, SOURCE, bound, translator

MODEL = Markov(8, vocab=6, length=6)
LIMITS = np.array([6, 3, 0, 5])


def drafted(step, states, **options):
    other = Markov(9, vocab=6, length=6)
    return speculative(
        step, states, draft=ModelDraft(other.table_step, other.states(4, 1), 2), **options
    )


SEARCHES = {
    "greedy": (greedy, 1),
    "sample": (functools.partial(sample, key=jax.random.key(1)), 1),
    "beams": (functools.partial(beam_search, num_beams=3), 3),
    "groups": (functools.partial(beam_search, num_beams=4, num_beam_groups=2), 4),
    "speculative": (drafted, 1),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", SEARCHES)
def test_a_length_is_that_of_the_text_through_its_end(name):
    search, beams = SEARCHES[name]
    prefix = np.array([[1, 3], [1, 4], [1, 5], [1, 3]])
    options = dict(batch=4, max_new_tokens=6, limits=jnp.array(LIMITS), prefix=prefix)
    options["processors"] = [constraints.min_new_tokens(3, EOS)]
    found = {}
    for pad in (0, EOS, 4):  # of its own, that of the end, that of a word
        call = jax.jit(lambda s, pad=pad: search(MODEL.table_step, s, pad_id=pad, **options))
        found[pad] = jax.device_get(call(MODEL.states(4, beams)))
    own = found[0]
    assert EOS in own.tokens and 4 in own.tokens, "there should be an end, and a word 4"
    for pad, other in found.items():
        np.testing.assert_array_equal(other.lengths, own.lengths)
        np.testing.assert_array_equal(other.tokens, np.where(own.tokens == 0, pad, own.tokens))
        for row, limit in enumerate(LIMITS):
            for tokens, length in zip(own.tokens[row].tolist(), other.lengths[row], strict=True):
                ended = tokens.index(EOS) + 1 if EOS in tokens else limit
                assert length == (ended if limit else 0)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"candidates": 3}, {"draft": PromptLookup(jnp.asarray(SOURCE), 3)}],
    ids=["greedy", "beams", "candidates", "draft"],
)
def test_the_row_of_the_end_is_captured_where_padding_is_the_end(options):
    build, params = translator(decoder_layers=1)
    options = dict(max_new_tokens=LENGTH, capture=Capture(heads=(1,)), **options)

    @jax.jit
    def call(params):
        model = bound((build, params))
        found = generate(model, SOURCE, SEGMENTS, pad_id=EOS, **options)
        best = found.tokens[:, 0]
        return found, attention_of(model, SOURCE, best, SEGMENTS, lengths=found.lengths[:, 0])

    found, whole = jax.device_get(call(params))
    real = np.arange(LENGTH) < found.lengths[..., None]
    ended = np.take_along_axis(found.tokens, found.lengths[..., None] - 1, axis=-1) == EOS
    assert ended.any() and not real.all()
    np.testing.assert_allclose(found.weights.sum(-1)[:, :, 0, 0], real, atol=1e-5)
    expected = whole[0, :, 1]  # [B T S]
    np.testing.assert_allclose(found.weights[:, 0, 0, 0], expected, rtol=1e-3, atol=1e-5)
