"""A PixArt is its equations in numpy: patches read words, and the time modulates all else."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.interventions import captured
from crossattn.models import PixArt, pixart
from crossattn.nn.encoded import Encoded
from crossattn.nn.stack import Stack
from crossattn.nn.sublayers import BlockConfig
from experiments.parity.weights import weight
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled
from tests.models.golden import make_pixart

TINY = pixart.tiny()
GIVEN = {name: jnp.asarray(x) for name, x in pixart.example(TINY, 3, padding=2).items()}


def build(rngs):
    return PixArt(TINY, rngs=rngs)


@functools.cache
def params():
    return oracle.random_params(build, seed=0)


def bound():
    return xa.functional.bind(build, params())


@jax.jit
def call(params, **given):
    return xa.apply(build, params, **given)


def silu(x):
    return x / (1 + np.exp(-x))


def dense(p, x):
    return np.tensordot(x, p["kernel"].astype(np.float64), 1) + p["bias"]


def modulated(vectors, x):
    """n(x, c) of a shift and a scale [B D]; LN has its own scale and bias, here those of ``vectors``."""
    norm, shift, scale = vectors
    return (1 + scale[:, None]) * oracle.layer_norm(norm, x) + shift[:, None]


def in_numpy(p, image, time, tokens, segment_ids, vectors_of=None):
    """The model in float64, by the equations of its file.

    ``vectors_of(layer, sublayer, condition)`` gives shift, scale and gate [B D]; None is DiT's, linear layers
    of the condition in each sublayer.
    """
    D, side = TINY.block.dim, TINY.patch_size
    allowed = (segment_ids > 0)[:, None, :]
    words = oracle.embed(p["input"], tokens, "sinusoidal")
    words = oracle._layers(p["encoder"], words, allowed=allowed, act="gelu")
    words = oracle.norm(p["encoder_norm"], words)
    angles = np.rint(1000 * time)[:, None] / 10000 ** (np.arange(D // 2) / (D // 2))
    sinusoids = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    condition = silu(dense(p["time"]["down"], silu(dense(p["time"]["up"], sinusoids))))

    def linear(layer, name, condition):
        own = p["stack"]["layers"][str(layer)][f"{name}_residual"]
        return [dense(own[part], condition) for part in ("shift", "scale", "opening")]

    B, H, W, C = image.shape
    patches = image.reshape(B, H // side, side, W // side, side, C).transpose(0, 1, 3, 5, 2, 4)
    kernel = p["patches"]["projection"]["kernel"].reshape(-1, D)
    z = patches.reshape(B, -1, C * side * side) @ kernel.astype(np.float64)
    z = z + p["patches"]["projection"]["bias"] + p["patches"]["positions"]["table"]
    for layer in range(TINY.layers):
        block = p["stack"]["layers"][str(layer)]
        for name in ("attention", "cross", "feedforward"):
            if name == "cross":
                z = z + oracle.attention(block["cross"], z, words, allowed)[0]
                continue
            shift, scale, gate = (vectors_of or linear)(layer, name, condition)
            x = modulated((block[f"{name}_residual"]["norm"], shift, scale), z)
            run = {
                "attention": lambda own, x: oracle.attention(own, x)[0],
                "feedforward": lambda own, x: oracle.feedforward(own, x, "gelu"),
            }
            z = z + gate[:, None] * run[name](block[name], x)
    scale, shift = np.moveaxis(dense(p["modulation"], condition), 1, 0)
    out = dense(p["output"], modulated((p["norm"], shift, scale), z))  # [B P side side C]
    out = out.reshape(B, H // side, W // side, side, side, C).transpose(0, 1, 3, 2, 4, 5)
    return out.reshape(B, H, W, C)


def test_it_is_its_equations():
    own = jax.tree.map(np.asarray, params())
    given = {name: np.asarray(x) for name, x in GIVEN.items()}
    close(call(params(), **GIVEN), in_numpy(own, **given), ulps=5000)


def test_modulation_that_blocks_share_but_for_their_biases_is_adaln_single():
    """PixArt's section 2.3: [shift, scale, gate] x 2 = S + E of the block, S one linear layer of the time."""
    D, rng = TINY.block.dim, np.random.default_rng(0)
    own = jax.tree.map(np.asarray, params())
    shared, bias = rng.normal(size=(D, 6, D)) / D**0.5, rng.normal(size=(6, D))
    tables = rng.normal(size=(TINY.layers, 6, D))
    names, parts = ("attention", "feedforward"), ("shift", "scale", "opening")

    def single(layer, name, condition):
        vectors = np.tensordot(condition, shared, 1) + bias + tables[layer]
        return np.moveaxis(vectors.reshape(-1, 2, 3, D)[:, names.index(name)], 1, 0)

    for layer, table in enumerate(tables):
        for i, (name, part) in enumerate((n, part) for n in names for part in parts):
            residual = own["stack"]["layers"][str(layer)][f"{name}_residual"]
            added = bias[i] + table[i]
            residual[part] = jax.tree.map(np.float32, {"kernel": shared[:, i], "bias": added})
    given = {name: np.asarray(x) for name, x in GIVEN.items()}
    close(call(own, **GIVEN), in_numpy(own, **given, vectors_of=single), ulps=5000)


def test_its_blocks_compute_what_those_of_diffusers_compute():
    D, N = make_pixart.DIM, make_pixart.HEADS
    with np.load(make_pixart.FILE, allow_pickle=False) as file:
        theirs = {
            name: weight(name, tuple(x)) for name, x in json.loads(str(file["shapes"])).items()
        }
        patches, condition, expected = (file[name] for name in ("patches", "condition", "out"))
    shape = BlockConfig.of(dim=D, num_heads=N, mlp_dim=4 * D, activation="gelu")
    stack = lambda rngs: Stack(lambda rngs: pixart.reading_block(shape, rngs), 2, rngs=rngs)  # noqa: E731
    sides = {"query": (D, N, -1), "key": (D, N, -1), "value": (D, N, -1), "out": (N, -1, D)}
    names = {"query": "to_q", "key": "to_k", "value": "to_v", "out": "to_out.0"}

    def layer(name, kernel=(D, -1), bias=(-1,)):
        own = theirs[f"{name}.weight"].T, theirs[f"{name}.bias"]
        return {"kernel": own[0].reshape(kernel), "bias": own[1].reshape(bias)}

    def block(name):
        own = {
            ours: {
                p: layer(f"{name}.{at}.{names[p]}", side, side[1 + (p == "out") :])
                for p, side in sides.items()
            }
            for ours, at in (("attention", "attn1"), ("cross", "attn2"))
        }
        own["feedforward"] = {
            "up": layer(f"{name}.ff.net.0.proj"),
            "down": layer(f"{name}.ff.net.2", (-1, D)),
        }
        single = layer("adaln_single.linear", (D, 2, 3, D), (2, 3, D))
        single["bias"] = single["bias"] + theirs[f"{name}.scale_shift_table"].reshape(2, 3, D)
        for i, sublayer in enumerate(("attention", "feedforward")):
            norm = {"scale": np.ones(D, np.float32), "bias": np.zeros(D, np.float32)}
            parts = enumerate(("shift", "scale", "opening"))
            vectors = {p: {k: x[..., i, j, :] for k, x in single.items()} for j, p in parts}
            own[f"{sublayer}_residual"] = {"norm": norm} | vectors
        return own

    params = {"layers": {str(i): block(f"transformer_blocks.{i}") for i in range(2)}}
    bound = xa.functional.bind(stack, jax.tree.map(jnp.asarray, params))
    given = make_pixart.inputs()
    words = Encoded(jnp.asarray(given["words"]), jnp.asarray(given["valid"]) > 0)
    states = bound.map(lambda block: block.read({"words": words}))
    found, _ = compiled(bound, jnp.asarray(patches), states, condition=jnp.asarray(condition))
    close(found, expected, ulps=2000)


def test_every_word_and_the_time_reach_every_pixel_of_their_own_picture():
    found = call(params(), **GIVEN)
    assert found.shape == GIVEN["image"].shape
    other = {**GIVEN, "tokens": GIVEN["tokens"].at[0, 2].set(9)}
    moved = np.abs(call(params(), **other) - found)
    assert moved[0].min() > 0 and not moved[1:].any()
    moved = np.abs(call(params(), **{**GIVEN, "time": GIVEN["time"].at[1].add(0.1)}) - found)
    assert moved[1].min() > 0 and not moved[[0, 2]].any()


def test_at_first_the_output_is_0_the_time_changes_nothing_and_a_block_only_reads():
    """adaLN-Zero: self-attention and networks are closed, so that only the words are added to patches."""
    fresh = xa.functional.bind(build, xa.init(build, jax.random.key(0)))
    assert not call(xa.functional.params_of(fresh), **GIVEN).any()
    assert not fresh.modulation(jnp.ones(TINY.block.dim)).any()

    @jax.jit
    def both(condition):
        states = fresh.read(GIVEN["tokens"], GIVEN["segment_ids"])
        z = read = fresh.patches(GIVEN["image"])
        for block, state in zip(fresh.stack.blocks(), states, strict=True):
            read = read + block.cross(read, state.memories["cross"])
        return fresh.stack(z, states, condition=condition)[0], read

    condition = jnp.ones((3, TINY.block.dim))
    own, read = both(condition)
    np.testing.assert_array_equal(own, both(2 * condition)[0])
    close(own, read, ulps=2000)


def test_words_that_are_padding_ask_nothing_and_change_nothing():
    names = ["encoder.attention.stats"]
    _, found = compiled(lambda model: captured(lambda own: own(**GIVEN), model, names), bound())
    asks = np.isfinite(found[names[0]].lse).all((0, 2))  # [B S], of all layers and heads
    np.testing.assert_array_equal(asks, GIVEN["segment_ids"] > 0)
    padded = GIVEN["segment_ids"] == 0
    other = {**GIVEN, "tokens": jnp.where(padded, 9, GIVEN["tokens"])}
    assert padded.any()
    np.testing.assert_array_equal(call(params(), **other), call(params(), **GIVEN))


def test_without_words_attention_adds_its_bias_alone_whatever_the_words():
    none = jnp.zeros_like(GIVEN["segment_ids"])
    found = call(params(), **{**GIVEN, "segment_ids": none})
    other = {**GIVEN, "segment_ids": none, "tokens": GIVEN["tokens"] * 0 + 5}
    np.testing.assert_array_equal(found, call(params(), **other))
    assert np.isfinite(found).all() and np.abs(found - call(params(), **GIVEN)).max() > 1e-2

    def first(model, image):
        block, state = model.stack.blocks()[0], model.read(GIVEN["tokens"], none)[0]
        return block.cross(model.patches(image), state.memories["cross"])

    added = compiled(first, bound(), GIVEN["image"])
    bias = params()["stack"]["layers"]["0"]["cross"]["out"]["bias"]
    np.testing.assert_array_equal(added, np.broadcast_to(bias, added.shape))


def test_what_is_read_once_serves_any_number_of_times():
    model = bound()
    states = jax.jit(model.read)(GIVEN["tokens"], GIVEN["segment_ids"])
    denoise = jax.jit(model.denoise)
    for time in (GIVEN["time"], GIVEN["time"] / 2):
        found = denoise(GIVEN["image"], time, states)
        close(found, call(params(), **{**GIVEN, "time": time}), ulps=2000)


def test_attention_to_the_words_sums_to_one_and_padding_gets_none():
    model = bound()

    @jax.jit
    def denoised():
        states = model.read(GIVEN["tokens"], GIVEN["segment_ids"])
        return model.denoise(GIVEN["image"], GIVEN["time"], states, return_weights=True)

    found, weights = denoised()
    assert weights.shape == (2, 3, 2, 6, 7)  # layers, rows, heads, patches, words
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert not weights[..., 5:].any() and (weights[..., :5] > 0).all()
    close(found, call(params(), **GIVEN), ulps=2000)


def test_a_patch_of_the_output_stands_where_the_patch_of_the_picture_stood():
    """With an output layer of a constant, each pixel has the number of its place in a patch."""
    numbers = np.arange(2 * 2 * 3, dtype=np.float32).reshape(2, 2, 3)
    own = jax.tree.map(jnp.asarray, params())
    kernel, bias = own["output"]["kernel"], own["output"]["bias"]
    own["output"] = {"kernel": kernel * 0, "bias": bias * 0 + numbers}
    found = call(own, **GIVEN)
    np.testing.assert_array_equal(found[0], np.tile(numbers, (2, 3, 1)))


@pytest.mark.parametrize("scan", [False, True])
def test_scanned_and_recomputed_it_is_the_same(scan):
    changed = replace(TINY, scan=scan, remat=True)
    own = params()
    if scan:
        layers = xa.nn.stack_layers(own["stack"]["layers"])
        own = {**own, "stack": {**own["stack"], "layers": layers}}
    again = lambda rngs: PixArt(changed, rngs=rngs)  # noqa: E731
    found = jax.jit(lambda params: xa.apply(again, params, **GIVEN))(own)
    close(found, call(params(), **GIVEN), ulps=2000)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="4 x 6; expected multiples of patch_size, 4"):
        xa.functional.shapes(lambda rngs: PixArt(replace(TINY, patch_size=4), rngs=rngs))
    with pytest.raises(ValueError, match=r"image is \(3, 4, 4, 3\); expected"):
        call(params(), **{**GIVEN, "image": GIVEN["image"][:, :, :4]})


def test_places_of_patches_begin_as_sinusoids_of_row_and_column():
    """Beside patches of noise, smaller ones are lost: attention would not find the neighbours of a patch."""
    found = pixart.sinusoids_of((2, 3), 12)
    rows, columns = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2])
    for at, own in ((rows, found[:, :6]), (columns, found[:, 6:])):
        angles = at[:, None] / 100 ** (np.arange(3) / 3)
        expected = np.concatenate([np.sin(angles), np.cos(angles)], -1)
        np.testing.assert_allclose(own, expected, atol=1e-6)
    table = xa.init(build, jax.random.key(0))["patches"]["positions"]["table"]
    np.testing.assert_array_equal(table, pixart.sinusoids_of((2, 3), TINY.block.dim))
