"""SelfDoc holds to the paper's equations in float64 numpy, keeps to its pages, names what does not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import SelfDoc, selfdoc
from crossattn.models.selfdoc import CrossModality, GatedFusion, TextParts
from crossattn.nn import BlockConfig, Encoded
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled

RNG = np.random.default_rng(0)
SHAPE = BlockConfig.of(dim=8, num_heads=2, mlp_dim=16, activation="gelu")
TEXT = RNG.normal(size=(2, 5, 8)).astype(np.float32)
PICTURE = RNG.normal(size=(2, 5, 8)).astype(np.float32)


def layer(rngs):
    return CrossModality(SHAPE, rngs=rngs)


def agreement(p, own, other, values):
    """Equation of the first stage: queries of ``own``, keys of ``other``, values one for each key."""
    out = 0.0
    for head in range(2):
        q, k, v = (
            x @ p[name]["kernel"][:, head].astype(np.float64) + p[name]["bias"][head]
            for name, x in (("query", own), ("key", other), ("value", values))
        )
        weights = oracle.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
        out = out + weights @ v @ p["out"]["kernel"][head].astype(np.float64)
    return out + p["out"]["bias"]


def in_numpy(params, text, picture):
    """The two stages and the networks of one layer."""
    p, q = params["text"], params["picture"]

    def normed(stage):
        of = lambda side: side[stage]["cross_residual"]["norm"]  # noqa: E731
        return oracle.norm(of(p), text), oracle.norm(of(q), picture)

    n, m = normed("agreeing")
    text = text + agreement(p["agreeing"]["cross"], n, m, n)
    picture = picture + agreement(q["agreeing"]["cross"], m, n, m)
    (n, m), p, q = normed("reading"), p["reading"], q["reading"]
    (a, weights), (b, back) = oracle.attention(p["cross"], n, m), oracle.attention(q["cross"], m, n)
    found = []
    for side, x in ((p, text + a), (q, picture + b)):
        network = functools.partial(oracle.feedforward, side["feedforward"], activation="gelu")
        found.append(oracle.residual(side["feedforward_residual"], x, network, True))
    return *found, weights, back


def test_a_layer_is_the_equations_of_the_paper():
    params = oracle.random_params(layer)
    run = jax.jit(lambda text, picture: xa.apply(layer, params, text, picture))
    text, picture, weights = run(Encoded(jnp.asarray(TEXT)), Encoded(jnp.asarray(PICTURE)))
    expected = in_numpy(params, TEXT.astype(np.float64), PICTURE.astype(np.float64))
    close((text.vectors, picture.vectors, *weights), expected, ulps=1000)


def test_a_text_is_the_mean_of_its_tokens_and_0_without_any():
    build = lambda rngs: TextParts(selfdoc.tiny(), rngs)  # noqa: E731
    parts = xa.functional.bind(build, oracle.random_params(build))
    tokens = jnp.array([[5, 6, 7], [8, 0, 0], [0, 0, 0]])
    found = jax.jit(lambda: parts(tokens, None))()
    alone = lambda parts, x: parts.encoder(parts.input(x))[0].mean(0)  # noqa: E731
    for row, length in ((0, 3), (1, 1)):
        close(found[row], compiled(alone, parts, tokens[row, :length]), ulps=1000)
    assert not np.any(found[2])


def test_the_gate_weighs_text_and_picture():
    fusion = lambda rngs: GatedFusion(SHAPE, rngs=rngs)  # noqa: E731
    params = oracle.random_params(fusion)
    found, gates = compiled(lambda *given: xa.apply(fusion, *given), params, TEXT, PICTURE)
    p = params["gate"]
    text, picture = (
        oracle.norm(params[f"{side}_norm"], x.astype(np.float64))
        for side, x in (("text", TEXT), ("picture", PICTURE))
    )
    gate = 1 / (1 + np.exp(-(np.concatenate([text, picture], -1) @ p["kernel"] + p["bias"])))
    close((found, gates), (gate * text + (1 - gate) * picture, gate[..., 0]), ulps=100)


# Whole models.

TOKENS = RNG.integers(1, 64, (3, 4, 6)).astype(np.int32) * (np.arange(6) < 4)
EDGES = RNG.uniform(0, 0.5, (3, 4, 2))
BOXES = np.concatenate([EDGES, EDGES + RNG.uniform(0.1, 0.5, (3, 4, 2))], -1).astype(np.float32)
PICTURES = RNG.normal(size=(3, 4, 4, 8, 1)).astype(np.float32)
SEGMENTS = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 2, 2]], np.int32)


def model(rngs):
    return SelfDoc(selfdoc.tiny(), rngs=rngs)


@pytest.fixture(scope="module")
def run():
    params = oracle.random_params(model)
    return jax.jit(lambda *page: xa.apply(model, params, *page))


@pytest.mark.slow
def test_padding_of_regions_and_of_texts_changes_nothing(run):
    found = run(TOKENS, BOXES, PICTURES, SEGMENTS)
    there = SEGMENTS > 0
    other = np.where(there[..., None], TOKENS, 7), np.where(there[..., None], BOXES, np.nan)
    pictures = np.where(there[..., None, None, None], PICTURES, np.nan)
    close(np.asarray(run(*other, pictures, SEGMENTS))[there], np.asarray(found)[there])
    alone = run(TOKENS[1:2, :3], BOXES[1:2, :3], PICTURES[1:2, :3], SEGMENTS[1:2, :3])
    close(found[1, :3], alone[0], ulps=1000)
    longer = run(TOKENS[..., :4], BOXES, PICTURES, SEGMENTS)
    close(np.asarray(longer)[there], np.asarray(found)[there], ulps=1000)
    empty = TOKENS.copy()
    empty[0, 1] = 0  # a region without a text, and below a page without regions
    read = run(empty, BOXES, PICTURES, SEGMENTS)
    assert np.isfinite(read).all() and np.any(read[0, 1] != found[0, 1])
    assert np.isfinite(run(TOKENS, BOXES, PICTURES, np.zeros_like(SEGMENTS))).all()


def test_a_row_equals_its_pages(run):
    found = run(TOKENS, BOXES, PICTURES, SEGMENTS)
    second = [x[2:, 2:] for x in (TOKENS, BOXES, PICTURES)]
    close(run(*second, np.ones((1, 2), np.int32))[0], found[2, 2:], ulps=1000)


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["both", "text", "picture"])
def test_every_parameter_learns_and_what_is_not_read_has_none(reads):
    build = lambda rngs: SelfDoc(selfdoc.tiny(reads=reads), rngs=rngs)  # noqa: E731
    params, page = oracle.random_params(build), (TOKENS, BOXES, PICTURES, SEGMENTS)
    page = tuple(map(jnp.asarray, page))
    loss = lambda p: jnp.sin(xa.apply(build, p, *page)).sum()  # noqa: E731
    for path, leaf in xa.functional.flatten(jax.jit(jax.grad(loss))(params)).items():
        assert path.endswith("key.bias") or np.any(leaf), path
    assert ("text" in params, "picture" in params) == (reads != "picture", reads != "text")
    assert ("cross" in params) == ("fusion" in params) == (reads == "both")


def test_what_does_not_fit_is_named(in_production):
    module = xa.functional.bind(model, oracle.random_params(model))
    for page, said in (
        ((TOKENS[:, :3], BOXES, PICTURES), "as many of each, one a region"),
        ((TOKENS, BOXES, PICTURES[..., :4, :]), r"pictures are \[4, 4, 1\]; expected this model's"),
        ((np.tile(TOKENS, 2), BOXES, PICTURES), "12 tokens .* learned 6 positions"),
    ):
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(module, *page)
    for changes, said in (
        (dict(patch=3), "patch is 3; expected a divisor"),
        (dict(reads="sound"), "reads is 'sound'; expected 'both'"),
    ):
        with pytest.raises(ValueError, match=said):
            xa.functional.shapes(lambda rngs, c=changes: SelfDoc(selfdoc.tiny(**c), rngs=rngs))
    alone = lambda rngs: SelfDoc(selfdoc.tiny(reads="text"), rngs=rngs)  # noqa: E731
    with pytest.raises(ValueError, match="one modality alone reads no other"):
        hidden = xa.functional.bind(alone, oracle.random_params(alone)).hidden
        jax.eval_shape(functools.partial(hidden, return_weights=True), TOKENS, BOXES, PICTURES)
