"""Perceiver IO: against numpy, and what it promises of padding, rows, sizes and gradients.

That it computes what ``transformers`` computes is for ``tests/weights/test_parity.py``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import PerceiverIO, perceiver_io
from crossattn.nn import BlockConfig
from crossattn.ops.positions import fourier
from tests import numpy_model as oracle

RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(3, 64, (3, 7)))
IMAGE = jnp.asarray(RNG.normal(size=(3, 4, 5, 3)), jnp.float32)
SOUND = jnp.asarray(np.random.default_rng(1).normal(size=(3, 9, 6)), jnp.float32)
LENGTHS = np.array([7, 4, 2])
PRESENT = jnp.asarray(np.arange(7) < LENGTHS[:, None], jnp.int32)
BYTES = perceiver_io.tiny()
PICTURE = perceiver_io.tiny(vocab_size=None, image_size=(4, 5), num_classes=5)
BOTH = perceiver_io.tiny(image_size=(4, 5), num_classes=5, token_dim=24)
SPOKEN = perceiver_io.tiny(vocab_size=None, frames=9, mels=6, num_classes=5)
ALL = perceiver_io.replace(BOTH, frames=9, mels=6)
CONFIGS = {"bytes": BYTES, "picture": PICTURE, "both": BOTH, "sound": SPOKEN, "all": ALL}


def given(config, rows=slice(None), **more):
    """Returns the inputs of a model of this config."""
    found = {}
    if config.vocab_size is not None:
        found |= dict(tokens=TOKENS[rows], segment_ids=PRESENT[rows])
    if config.image_size is not None:
        found |= dict(image=IMAGE[rows])
    if config.frames is not None:
        found |= dict(sound=SOUND[rows])
    return found | more


def built(config):
    build = lambda rngs: PerceiverIO(config, rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build)


def run(config, **options):
    build, params = built(config)
    return jax.jit(lambda p, given: xa.apply(build, p, **given, **options)), params


def reads(p, x, memory, allowed=None):
    """x + Attend(LN x, LN memory), then x + MLP(LN x)."""
    normed = oracle.layer_norm(p["cross_residual"]["norm"], x)
    memory = oracle.layer_norm(p["cross"]["memory_norm"], memory)
    x = x + oracle.attention(p["cross"], normed, memory, allowed)[0]
    network = lambda x: oracle.feedforward(p["feedforward"], x, "gelu")  # noqa: E731
    return oracle.residual(p["feedforward_residual"], x, network, True)


def in_numpy(config, p):
    """The equations, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    kinds, allowed = [], []
    if config.image_size:
        places = np.asarray(fourier((4, 5), config.bands)).reshape(1, 20, -1).repeat(3, 0)
        kinds.append(np.concatenate([np.asarray(IMAGE).reshape(3, 20, 3), places], -1))
        allowed.append(np.ones((3, 20)))
    if config.frames:
        places = np.asarray(fourier((9,), config.bands))[None].repeat(3, 0)
        kinds.append(np.concatenate([np.asarray(SOUND), places], -1))
        allowed.append(np.ones((3, 9)))
    if config.vocab_size:
        table, positions = p["tokens"]["embedding"]["table"], p["tokens"]["learned"]["table"]
        kinds.append(table[np.asarray(TOKENS)] + positions[:7])
        allowed.append(np.asarray(PRESENT))
    if len(kinds) > 1:
        wide = [np.broadcast_to(p["kinds"][str(i)], (*x.shape[:2], p["kinds"][str(i)].shape[1]))
                for i, x in enumerate(kinds)]  # fmt: skip
        kinds = [np.concatenate(pair, -1) for pair in zip(kinds, wide, strict=True)]
    latents = np.broadcast_to(p["latents"], (3, *p["latents"].shape))
    mask = np.concatenate(allowed, 1)[:, None].astype(bool).repeat(latents.shape[1], 1)
    z = reads(p["read"], latents, np.concatenate(kinds, 1), mask)
    for _ in range(config.repeats):
        z = oracle.block(p["layers"]["layers"]["0"], z, act="gelu")
    count = 1 if config.num_classes else 7
    y = reads(p["write"], np.broadcast_to(p["queries"]["table"][:count], (3, count, 32)), z)
    if config.num_classes:
        return y[:, 0] @ p["output"]["linear"]["kernel"] + p["output"]["linear"]["bias"]
    return y @ table.T + p["output"]["bias"]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_numpy(name):
    call, params = run(CONFIGS[name])
    expected = in_numpy(CONFIGS[name], params)
    np.testing.assert_allclose(call(params, given(CONFIGS[name])), expected, rtol=1e-4, atol=1e-4)


def test_padding_of_texts_beside_pictures_and_sounds_changes_nothing():
    call, params = run(ALL)
    found = call(params, given(ALL))
    other = jnp.where(PRESENT, TOKENS, 63 - TOKENS)
    np.testing.assert_array_equal(call(params, given(ALL, tokens=other)), found)
    short = given(ALL, slice(1, 2))
    short |= {name: short[name][:, : LENGTHS[1]] for name in ("tokens", "segment_ids")}
    np.testing.assert_allclose(call(params, short)[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["picture", "all"])
def test_every_parameter_learns(name):
    config = CONFIGS[name]
    build, params = built(config)
    loss = lambda p: jnp.sin(xa.apply(build, p, **given(config))).sum()  # noqa: E731
    for path, gradient in xa.functional.flatten(jax.jit(jax.grad(loss))(params)).items():
        # Adding a number to all logits of a query changes no weight.
        assert path.endswith("key.bias") or np.any(gradient), path


def test_a_picture_of_another_size_is_read_by_fourier_positions_and_not_by_learnt_ones(
    in_production,
):
    call, params = run(PICTURE)
    assert call(params, {"image": jnp.zeros((2, 8, 10, 3))}).shape == (2, 5)
    learned = perceiver_io.replace(PICTURE, pixel_positions="learned", pixel_dim=8)
    call, params = run(learned)
    assert call(params, given(learned)).shape == (3, 5)
    with pytest.raises(ValueError, match=r"image is \[... 8 10 3\]; expected \(4, 5, 3\)"):
        call(params, {"image": jnp.zeros((2, 8, 10, 3))})


def test_layers_scan_as_they_loop():
    config = perceiver_io.tiny(layers=2)
    call, params = run(config)
    scanned, _ = run(perceiver_io.replace(config, scan=True))
    other = params | {"layers": {"layers": xa.nn.stack_layers(params["layers"]["layers"])}}
    found, expected = scanned(other, given(config)), call(params, given(config))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_both_cross_attentions_give_their_weights():
    call, params = run(BOTH, return_weights=True)
    _, inputs, latents = call(params, given(BOTH))
    assert inputs.shape == (3, 1, 6, 27) and latents.shape == (3, 1, 1, 6)
    np.testing.assert_allclose(inputs.sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(inputs[2, ..., 22:], 0)


@pytest.mark.slow
def test_values_and_keys_may_differ_in_size_and_queries_be_left_out():
    """The output is linear in what the values say, so that twice the output matrix is twice the output."""
    block = BlockConfig.of(32, 2, 64, cross_heads=4, cross_head_dim=3)
    config = perceiver_io.tiny(block=block, write_skip=False, read_skip=False)
    build, params = built(config)
    assert params["write"]["cross"]["key"]["kernel"].shape == (32, 4, 3)
    queries = lambda p: xa.apply(build, p, jnp.ones((1, 2, 32)), method="decode")  # noqa: E731
    nothing = jax.tree.map(lambda x: x, params)
    nothing["write"]["cross"]["out"] = jax.tree.map(np.zeros_like, params["write"]["cross"]["out"])
    assert np.ptp(np.asarray(queries(nothing)), axis=1).max() == 0  # all queries alike


@pytest.mark.slow
def test_a_diagonal_start_reads_its_own_place_with_the_same_parameters():
    """Before any training the most of each row of weights lies near the diagonal; a random start has none."""
    block = BlockConfig.of(dim=64, num_heads=2, mlp_dim=64)
    random = perceiver_io.tiny(block=block, latents=32, max_length=32, vocab_size=8)
    diagonal = perceiver_io.replace(random, start="diagonal")
    tokens, near = jnp.asarray(RNG.integers(0, 8, (4, 32))), np.eye(32, dtype=bool)
    near |= np.eye(32, k=1, dtype=bool) | np.eye(32, k=-1, dtype=bool)
    shares, shapes = [], []
    for config in (random, diagonal):
        build, _ = built(config)
        params = xa.init(build, jax.random.key(0))
        call = functools.partial(xa.apply, build, return_weights=True)
        _, *weights = jax.jit(call)(params, tokens=tokens)
        shares.append([float((x * near).sum(-1).mean()) for x in weights])
        shapes.append(jax.tree.map(jnp.shape, params))
    assert shapes[0] == shapes[1]
    even = near.sum() / 32**2
    assert max(shares[0]) < 1.2 * even < 1.3 * even < min(shares[1]), shares


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_classes=3),
        dict(frames=9),
        dict(block=BlockConfig.of(48, 2, 64), write=BlockConfig.of(32, 2, 64)),
    ],
)
def test_a_diagonal_start_without_a_diagonal_is_refused(changes):
    config = perceiver_io.tiny(start="diagonal", **changes)
    with pytest.raises(ValueError, match="start is 'diagonal'; expected a model that reads"):
        xa.functional.shapes(lambda rngs: PerceiverIO(config, rngs=rngs))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(vocab_size=None), "vocab_size, image_size and frames are all None"),
        (dict(vocab_size=None, image_size=(4, 5)), "num_classes and vocab_size are both None"),
        (dict(token_dim=8), "token_dim is 8; a model that predicts tokens expects"),
        (dict(frames=9, mels=0, num_classes=3), "frames is 9 and mels is 0; expected 1 or more"),
        (dict(image_size=(4, 5), pixel_positions="learned"), "expected a pixel_dim"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        xa.functional.shapes(lambda rngs: PerceiverIO(perceiver_io.tiny(**changes), rngs=rngs))


@pytest.mark.parametrize(
    ("name", "inputs", "said"),
    [
        ("bytes", {}, "tokens is missing, but this PerceiverIO wants tokens"),
        ("bytes", dict(tokens=TOKENS, image=IMAGE), "image came, but .* reads no image"),
        ("both", dict(tokens=TOKENS), "image is missing"),
        ("all", dict(tokens=TOKENS, image=IMAGE), "sound is missing"),
        ("sound", dict(sound=SOUND[..., :5]), r"sound is \[... 9 5\]; expected \(9, 6\)"),
    ],
)
def test_what_is_read_is_said(name, inputs, said):
    build, params = built(CONFIGS[name])
    with pytest.raises(ValueError, match=said):
        xa.apply(build, params, **inputs)
