"""Heads are knocked out together, weighed by gradients, shut by gates and taken out of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn import models, nn
from crossattn.interventions import (
    Intervention,
    gates,
    hard_concrete,
    importance,
    knockout,
    knockouts,
    open_probability,
    prune,
)
from crossattn.models import decoder, transformer
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled
from tests.interventions.test_sites import build, given, model_of, run

CROSS = "decoder.cross.heads"


def losses(model, edits, example):
    """Negative log-likelihood of each row [B]."""
    logits = run(model, edits, **example)
    found = jax.nn.log_softmax(logits)[:, :-1]
    return -jnp.take_along_axis(found, example["target_in"][:, 1:, None], -1).sum((1, 2))


@pytest.mark.slow
def test_all_knockouts_of_one_program_are_those_of_a_program_each():
    model, example = model_of(), given()
    one = jax.jit(lambda edits: losses(model, edits, example))
    together = jax.jit(jax.vmap(lambda edits: losses(model, edits, example)))(
        knockouts(model, CROSS)
    )
    assert together.shape == (4, 2)
    alone = [one(knockout(model, CROSS, i // 2, i % 2)) for i in range(4)]
    close(together, np.stack(alone))
    assert len(np.unique(np.asarray(together)[:, 0])) == 4
    every = knockouts(model)  # of the encoder, the decoder and between them
    assert {name: x.scale.shape for name, x in every.items()}[CROSS] == (12, 2, 2)
    off = np.concatenate([1 - np.asarray(x.scale).reshape(12, 4) for x in every.values()], 1)
    np.testing.assert_array_equal(off, np.eye(12))


@pytest.mark.slow
def test_importance_is_the_mean_size_of_the_difference_quotient_of_each_example():
    model, example = model_of(), given(rows=3)
    found = jax.jit(lambda: importance(model, lambda edits: losses(model, edits, example)))()
    assert {name: x.shape for name, x in found.items()} == dict.fromkeys(
        ("encoder.attention.heads", "decoder.attention.heads", CROSS), (2, 2)
    )
    step = 1e-2
    at = jax.jit(lambda scale: losses(model, {CROSS: Intervention(scale=scale)}, example))
    for layer, head in np.ndindex(2, 2):
        moved = np.zeros((2, 2))
        moved[layer, head] = step
        slope = (at(jnp.asarray(1 + moved)) - at(jnp.asarray(1 - moved))) / (2 * step)
        np.testing.assert_allclose(
            found[CROSS][layer, head], np.abs(slope).mean(), rtol=0.02, atol=2e-4
        )


def test_gates_have_the_distribution_of_the_paper():
    log_alpha = jnp.array([-4.0, -1.0, 0.0, 2.0])
    drawn = jax.vmap(lambda key: hard_concrete(log_alpha, key))(
        jax.random.split(jax.random.key(0), 20000)
    )
    assert drawn.min() == 0 and drawn.max() == 1
    np.testing.assert_allclose((drawn > 0).mean(0), open_probability(log_alpha), atol=0.015)
    # P(gate = 1) is P(s >= (1 - gamma) / (zeta - gamma)) of the binary concrete s, the logistic's tail.
    whole = jax.nn.sigmoid(log_alpha - 2 / 3 * np.log((1.1 / 1.2) / (0.1 / 1.2)))
    np.testing.assert_allclose((drawn == 1).mean(0), whole, atol=0.015)
    np.testing.assert_array_equal(hard_concrete(jnp.array([-9.0, 0.0, 9.0])), [0, 0.5, 1])


@pytest.mark.slow
def test_trained_gates_shut_the_heads_that_the_loss_does_without():
    """Of four heads in two layers, the loss wants the outputs with two: the penalty shuts the others."""
    model, example = model_of(), given()
    wanted = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    target = run(model, {CROSS: Intervention(scale=wanted)}, **example)

    @jax.jit
    def step(log_alpha, key):
        def loss(log_alpha):
            logits = run(model, gates({CROSS: log_alpha}, key), **example)
            return jnp.square(logits - target).mean() + 0.02 * open_probability(log_alpha).sum()

        return log_alpha - 2.0 * jax.grad(loss)(log_alpha)

    log_alpha = jnp.full((2, 2), 1.0)
    for key in jax.random.split(jax.random.key(1), 300):
        log_alpha = step(log_alpha, key)
    np.testing.assert_array_equal(gates({CROSS: log_alpha})[CROSS].scale > 0, wanted > 0)


KEPT = np.array([[True, False], [False, True]])


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_a_pruned_model_computes_what_scales_of_zero_leave_and_is_smaller(scan):
    model, example = model_of(scan=scan), given()
    sites = ("encoder.attention.heads", "decoder.attention.heads", CROSS)
    small = prune(model, dict.fromkeys(sites, KEPT))
    edits = {site: Intervention(scale=jnp.asarray(KEPT, jnp.float32)) for site in sites}
    expected = run(model, edits, **example)
    close(run(small, None, **example), expected, ulps=2000)
    counts = [xa.functional.count(xa.functional.params_of(x)) for x in (model, small)]
    # Of 32 x 32 kernels, three and a half biases: half of query, key, value and output each.
    assert counts[0] - counts[1] == 2 * 3 * (4 * 32 * 16 + 3 * 16)

    # It is built again from a config, and decodes.
    again = lambda rngs: prune(build(scan=scan)(rngs), dict.fromkeys(sites, KEPT))  # noqa: E731
    loaded = xa.functional.bind(again, jax.device_get(xa.functional.params_of(small)))
    np.testing.assert_array_equal(run(loaded, None, **example), run(small, None, **example))
    source = {k: x for k, x in example.items() if k.startswith("source")}

    def decoded(model, text, source):
        _, states = model.decode_step(text[:, None, :2], model.prefill(2, 1, 8, **source))
        return model.decode_step(text[:, None, 2:3], states)[0]

    logits = compiled(decoded, loaded, example["target_in"], source)
    close(logits[:, 0], expected[:, 2:3], ulps=2000)


def test_looped_layers_lose_unlike_numbers_of_heads():
    model, example = model_of(), given()
    kept = np.array([[True, True], [False, True]])
    edits = {CROSS: Intervention(scale=jnp.asarray(kept, jnp.float32))}
    close(
        run(prune(model, {CROSS: kept}), None, **example), run(model, edits, **example), ulps=2000
    )


def grouped(rngs):
    block = nn.BlockConfig.of(dim=32, num_heads=4, mlp_dim=64, num_kv_heads=2, num_persistent=3)
    return models.Decoder(decoder.tiny(block=block), rngs=rngs)


def test_whole_groups_of_heads_go_with_their_keys_values_and_persistent_vectors():
    model = xa.functional.bind(grouped, oracle.random_params(grouped))
    kept = np.array([[True, True, False, False], [False, False, True, True]])
    tokens = jnp.array([[3, 5, 7, 9]])
    site = "decoder.attention.heads"
    edits = {site: Intervention(scale=jnp.asarray(kept, jnp.float32))}
    close(run(prune(model, {site: kept}), None, tokens), run(model, edits, tokens), ulps=2000)
    with pytest.raises(ValueError, match="share key and value heads by 2; expected whole groups"):
        prune(model, {site: np.array([[True, False, True, True]] * 2)})


def relative(rngs):
    return models.Transformer(transformer.tiny(positions="relative"), rngs=rngs)


@pytest.mark.parametrize(
    ("make", "kept", "message"),
    [
        (
            build(),
            {CROSS: KEPT[:1]},
            r"kept has shape \(1, 2\) for decoder.cross.heads; expected \(2, 2\)",
        ),
        (build(), {CROSS: KEPT & False}, "a layer of decoder.cross.heads keeps no head"),
        (build(), {"decoder.cross": KEPT}, r"expected \(2, None\)|has no heads"),
        (
            build(scan=True),
            {CROSS: KEPT | [[True], [False]]},
            "scanned layers of .* keep 2, 1 heads",
        ),
        (
            relative,
            {"encoder.attention.heads": KEPT},
            "adds a position bias that has a row for each head",
        ),
    ],
)
def test_what_cannot_be_pruned_is_one_sentence(make, kept, message):
    with pytest.raises(ValueError, match=message):
        prune(xa.functional.bind(make, oracle.random_params(make)), kept)


@pytest.mark.slow
def test_cross_attention_of_a_model_with_a_position_bias_is_pruned():
    model = xa.functional.bind(relative, oracle.random_params(relative))
    edits = {CROSS: Intervention(scale=jnp.asarray(KEPT, jnp.float32))}
    close(prune(model, {CROSS: KEPT})(**given()), run(model, edits, **given()), ulps=2000)
