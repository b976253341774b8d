"""Attention kept in the loop is that of one pass over the finished text, in every search."""

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
    constraints,
    generate,
    penalties,
    speculative,
)

from .translators import LENGTH, SEGMENTS, SOURCE, bound, language_model, translator

CHOSEN = Capture(layers=(-1, 0), heads=(1,))


@functools.cache
def model(scan):
    return translator(scan=scan)


def drafted(model, capture):
    """Speculative decoding with the model itself as its draft."""
    read = dict(source=jnp.asarray(SOURCE), source_segment_ids=jnp.asarray(SEGMENTS))
    start = lambda: model.prefill(3, 1, LENGTH + 4, **read)  # noqa: E731
    draft = ModelDraft(model.decode_step, start(), 2)
    options = dict(batch=3, max_new_tokens=LENGTH, capture=capture)
    return speculative(model.decode_step, start(), draft=draft, **options)


SEARCHES = {
    "greedy": {},
    "sample": {"key": jax.random.key(0)},
    "beams": {"num_beams": 3, "prefix": (1, 4, 3), "processors": [constraints.ban(5)]},
    "groups": {"num_beams": 4, "num_beam_groups": 2},
    "coverage": {"num_beams": 3, "coverage": penalties.Coverage(0.7, Capture(heads=(0,)))},
    "contrastive": {"candidates": 3, "prefix": (1, 4, 3)},
    "lookup": {"draft": PromptLookup(jnp.asarray(SOURCE), 3)},
    "speculative": drafted,
}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "scan"),
    [*((name, False) for name in SEARCHES), ("beams", True), ("speculative", True)],
)
def test_captured_attention_is_that_of_the_finished_text(name, scan):
    pair, options = model(scan), SEARCHES[name]

    @jax.jit
    def both(params):
        m = bound((pair[0], params))
        if callable(options):
            found = options(m, CHOSEN)
        else:
            found = generate(m, SOURCE, SEGMENTS, max_new_tokens=LENGTH, capture=CHOSEN, **options)
        _, *given = options.get("prefix", (1,)) if isinstance(options, dict) else (1,)
        B, J, T = found.tokens.shape
        begun = jnp.tile(jnp.array(given, jnp.int32), (B * J, 1))
        texts = jnp.concatenate([begun, found.tokens.reshape(B * J, T)], axis=1)
        sources, segment_ids = (np.repeat(x, J, axis=0) for x in (SOURCE, SEGMENTS))
        whole = attention_of(m, sources, texts, segment_ids)[..., len(given) :, :]
        L, _, *rest = whole.shape
        return found, whole.reshape(L, B, J, *rest)  # [L B J N T S]

    found, whole = jax.device_get(both(pair[1]))
    expected = np.moveaxis(whole[[1, 0]][:, :, :, [1]], 0, 2)  # [B J M N T S]
    assert found.weights.shape == expected.shape
    np.testing.assert_allclose(found.weights, expected, rtol=1e-3, atol=1e-5)
    assert found.lengths.min() < LENGTH or name == "sample"


def test_nothing_is_captured_unless_asked_for():
    pair = model(False)
    plain = lambda p: generate(bound((pair[0], p)), SOURCE, max_new_tokens=3)  # noqa: E731
    assert jax.eval_shape(lambda p: plain(p).weights, pair[1]) is None


def test_layers_and_heads_that_do_not_exist_are_refused():
    for capture, said in ((Capture(layers=(2,)), "layers has 2"), (Capture(heads=(-3,)), "heads")):
        with pytest.raises(ValueError, match=said):
            generate(bound(model(False)), SOURCE, max_new_tokens=3, capture=capture)


@pytest.mark.parametrize("options", [{}, {"candidates": 2}])
def test_a_model_without_a_source_has_nothing_to_capture(options):
    lm = bound(language_model())
    with pytest.raises(ValueError, match="reads no source"):
        generate(lm, batch=1, max_new_tokens=3, capture=Capture(), **options)
