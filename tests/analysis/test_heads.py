"""Numbers of heads are those of the matrix of weights, which they do without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn import nn
from crossattn.analysis.heads import of_heads
from crossattn.interventions import captured
from tests.compiled import compiled
from tests.interventions.test_sites import given, model_of, run
from tests.models import every_model

NAMES = ["encoder.attention", "decoder.attention", "decoder.cross"]


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_the_numbers_are_those_of_the_weights(scan):
    model, batch = model_of(scan=scan), given(rows=3, padding=2)
    _, found = run(
        model, None, **batch, capture=[f"{n}.{x}" for n in NAMES for x in ("weights", "stats")]
    )
    for name in NAMES:
        w = np.asarray(found[f"{name}.weights"], np.float64)
        target = "target" if name.startswith("decoder") else "source"
        source = "target" if name == "decoder.attention" else "source"
        asks, keys = (np.asarray(batch[f"{x}_segment_ids"]) > 0 for x in (target, source))
        numbers = of_heads(found[f"{name}.stats"], keys)
        L, B, N, T, S = w.shape
        expected = {key: np.zeros((L, N)) for key in numbers}
        for b in range(B):
            rows, K = np.flatnonzero(asks[b]), keys[b].sum()
            own = w[:, b][:, :, rows]
            logs = np.log(np.where(own > 0, own, 1))
            expected["entropy"] += -(own * logs).sum((-1, -2))
            expected["first"] += own[..., 0].sum(-1)
            expected["last"] += own[..., K - 1].sum(-1)
            expected["padding"] += own[..., ~keys[b]].sum((-1, -2))
            looks = (own * np.arange(S)).sum(-1) / (K - 1)
            expected["diagonality"] += (
                1 - np.abs(looks - np.arange(len(rows)) / (len(rows) - 1))
            ).sum(-1)
            expected["links"] += (own.max(-1) > 0.5).sum(-1)
        for key, x in expected.items():
            np.testing.assert_allclose(
                numbers[key], x / asks.sum(), atol=1e-5, err_msg=f"{name} {key}"
            )
        assert np.all(numbers["padding"] == 0) and np.all(numbers["entropy"] > 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["transformer_tts", "speecht5"])
def test_steps_of_padding_ask_nothing_of_the_letters(name):
    model = xa.functional.bind(every_model.build_of(name), every_model.params_of(name))
    batch = jax.tree.map(jnp.asarray, every_model.example(name, padding=2))
    _, found = run(model, None, **batch, capture=["decoder.cross.stats"])
    asks = np.isfinite(found["decoder.cross.stats"].lse).all((0, 2))
    np.testing.assert_array_equal(asks, np.asarray(batch["target_segment_ids"]) > 0)


def test_sequences_that_read_one_memory_have_statistics_of_their_own():
    """Neighbours [B K R] that read their chunk [B m]: of the matrices of weights [B K N R m]."""
    shape = nn.BlockConfig.of(dim=16, num_heads=2, mlp_dim=16)
    block = nn.Block(cross=shape.cross_attention(nnx.Rngs(0), memory_dim=16, reads="chunk"))
    drawn = [
        jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(3, 4, 5, 16), (3, 6, 16)])
    ]
    x, valid = drawn[0], jnp.arange(6) < jnp.array([[6], [4], [5]])
    allowed = jax.random.bernoulli(jax.random.key(2), 0.7, (3, 1, 5, 6)) & valid[:, None, None]
    memory = nn.Encoded(drawn[1], valid)
    _, state = compiled(
        block, x, memories={"chunk": memory}, memory_masks={"chunk": allowed},
        capture=["cross.weights", "cross.stats"],
    )  # fmt: skip
    w, stats = np.asarray(state.captured["cross.weights"]), state.captured["cross.stats"]
    assert w.shape == (3, 4, 2, 5, 6)
    np.testing.assert_allclose(stats.maximum, w.max(-1), atol=1e-6)
    np.testing.assert_allclose(stats.expected, (w * np.arange(6)).sum(-1), atol=1e-5)
    np.testing.assert_allclose(stats.mass, w.sum(-2), atol=1e-5)
    np.testing.assert_array_equal(stats.argmax, np.where(w.any(-1), w.argmax(-1), -1))


@pytest.mark.slow
def test_queries_of_padding_that_read_a_picture_are_not_counted():
    """A picture has no padding, so that rows after the end of a caption read it too."""
    q, k = (jax.random.normal(jax.random.key(i), (1, T, 2, 8)) for i, T in enumerate((5, 7)))
    own = jnp.arange(5)[None] < 3
    layers = lambda x: type(x)(*(None if a is None else a[None] for a in x))  # noqa: E731
    whole, short = (layers(xa.attention_stats(x, k)) for x in (q, q[:, :3]))
    found, expected = of_heads(whole, queries=own), of_heads(short)
    for name in ("entropy", "diagonality", "links"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)
    assert not np.allclose(of_heads(whole)["entropy"], expected["entropy"], rtol=1e-3)
    np.testing.assert_allclose(found["first"], of_heads(whole)["first"], rtol=1e-5)


def test_a_diagonal_head_has_a_diagonality_of_one_and_its_mirror_half():
    straight = xa.attention_stats(*(jnp.eye(9)[None, :, None] * 60,) * 2)
    turned = xa.attention_stats(
        jnp.eye(9)[None, :, None] * 60, jnp.eye(9)[::-1][None, :, None] * 60
    )
    one, other = (
        of_heads(type(x)(*(None if a is None else a[None] for a in x))) for x in (straight, turned)
    )
    np.testing.assert_allclose([one["diagonality"][0, 0], one["links"][0, 0]], 1, atol=1e-5)
    np.testing.assert_allclose(
        other["diagonality"][0, 0], 1 - np.abs(np.arange(9) - 4).mean() / 4, atol=1e-5
    )


def test_a_whole_loss_hands_out_what_it_reached():
    model, batch = model_of(), given()
    loss = lambda model: model.encode(batch["source"]).vectors.sum()  # noqa: E731
    total, found = captured(loss, model, [f"{name}.stats" for name in NAMES])
    np.testing.assert_array_equal(total, loss(model))
    assert list(found) == ["encoder.attention.stats"]
