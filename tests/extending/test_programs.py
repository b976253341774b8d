"""Programs of architectures that have a file of their own: its numbers from parts alone, step by step too."""

import functools
import re

import jax
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import decoder, vit
from crossattn.nn import BlockConfig, LocalAttention
from tests import numpy_model as oracle
from tests.closeness import close
from tests.models.test_selfdoc import in_numpy

from .captioner import Captioner
from .crossvit import CrossViT
from .llava import Llava
from .pointer import Pointer
from .recurrent import Recurrent
from .selfdoc import SelfDoc

V, D, M, B, S, T = 24, 16, 24, 3, 6, 10
RNG = np.random.default_rng(0)
VALID = np.arange(S) < np.array([[6], [4], [5]])
SOURCE = RNG.integers(3, V, (B, S)).astype(np.int32) * VALID
TOKENS = RNG.integers(3, V, (B, T)).astype(np.int32)
PICTURES = RNG.normal(size=(B, 8, 12, 3)).astype(np.float32)
IMAGES = RNG.normal(size=(B, 2, 8, 8, 3)).astype(np.float32)
PLACES = np.array([[0, 5], [2, -1], [1, 6]], np.int32)  # of the first of the four patches of each
TEXTS, LOOKS, BOXES = (RNG.normal(size=(B, S, n)).astype(np.float32) for n in (7, 9, 4))
PAIR = dict(source=SOURCE, target_in=TOKENS)

LOCAL = functools.partial(LocalAttention, window=2, predicted=False)

# How to build each program, and the arguments of a call.
PROGRAMS = {
    "crossvit": (
        lambda rngs: CrossViT((D, M), (2, 4), (8, 12), 5, rngs=rngs),
        dict(image=PICTURES),
    ),
    "captioner": (
        lambda rngs: Captioner(V, D, M, (8, 12), rngs=rngs),
        dict(source=PICTURES, target_in=TOKENS),
    ),
    "llava": (
        lambda rngs: Llava(V, D, M, (8, 8), rngs=rngs),
        dict(tokens=TOKENS, images=IMAGES, image_positions=PLACES),
    ),
    "selfdoc": (
        lambda rngs: SelfDoc(D, 7, 9, 5, rngs=rngs),
        dict(texts=TEXTS, pictures=LOOKS, boxes=BOXES, valid=VALID),
    ),
    "recurrent": (lambda rngs: Recurrent(V, V, D, layers=2, rngs=rngs), PAIR),
    "recurrent, local": (
        lambda rngs: Recurrent(V, V, D, cell="lstm", attention=LOCAL, rngs=rngs),
        PAIR,
    ),
    "pointer": (lambda rngs: Pointer(V, D, rngs=rngs), PAIR),
}
GENERATES = [name for name in PROGRAMS if name not in ("crossvit", "selfdoc")]

TEXT = dict(vocab_size=V, block=BlockConfig.of(D, num_heads=2, mlp_dim=2 * D))
DECODER = TEXT | dict(positions="sinusoidal", layers=2)
PATCHES = BlockConfig.of(M, num_heads=2, mlp_dim=4 * M, activation="gelu")

# The library's file of an architecture, its config, and the names that it has for the program's parameters.
FILES = {
    "captioner": (
        "vision_encoder_decoder",
        dict(
            encoder=vit.tiny(block=PATCHES, num_classes=None, image_size=(8, 12)),
            decoder=decoder.tiny(memory_dim=M, **DECODER),
        ),
        {
            "decoder": "decoder.decoder",
            "target_input": "decoder.input",
            r"reader\.stack": "encoder.encoder",
            "reader": "encoder",
        },
    ),
    "llava": (
        "llava",
        dict(image_dim=M, image_layers=2, image_norm_epsilon=1e-6, image_id=None, **DECODER),
        {
            "target_input": "input",
            "(first|second)": r"projector.\1",
            r"reader\.stack": "vision.encoder",
            "reader": "vision",
        },
    ),
    "recurrent": (
        "rnn_encoder_decoder",
        dict(vocab_size=V, source_vocab_size=V, dim=D, pad_id=0),
        {},
    ),
    "recurrent, local": (
        "rnn_encoder_decoder",
        dict(
            vocab_size=V,
            source_vocab_size=V,
            dim=D,
            pad_id=0,
            encoder_layers=1,
            decoder_layers=1,
            cell="lstm",
            attention="luong",
            scope="local-m",
            window=2,
        ),
        {},
    ),
    "pointer": ("pointer_generator", dict(pad_id=0, **TEXT), {}),
    "crossvit": (
        "crossvit",
        dict(
            block=BlockConfig.of(D, 2, 2 * D, activation="gelu"), large_dim=M, large_mlp_dim=2 * M
        ),
        {
            r"(\w+)\.stacks\.(\d)": r"stages.\2.\1",
            r"(\w+)\.exchanges\.(\d)": r"stages.\2.\1_reads.block",
            r"(\w+)\.(there|back)\.(\d)": r"stages.\3.\1_reads.\2",
            r"(\w+)\.(patches|norm|output)": r"\1_\2",
        },
    ),
}


@functools.cache
def program(name):
    """Parameters, and a compiled call with them."""
    build, _ = PROGRAMS[name]
    params, call = oracle.random_params(build, seed=2), jax.jit(functools.partial(xa.apply, build))
    return params, lambda given: call(params, **given)


def by_the_library(name, params, given):
    """What the library's model says with a program's parameters."""
    file, options, names = FILES[name]
    found = xa.models.find(file)
    build = lambda rngs: found.module(found.tiny(**options), rngs=rngs)  # noqa: E731

    def renamed(path):
        said = (re.subn(rf"^{old}\b", new, path) for old, new in names.items())
        return next((new for new, count in said if count), path)

    flat = {renamed(path): x for path, x in xa.functional.flatten(params).items()}
    call = jax.jit(lambda p, given: xa.apply(build, p, **given))
    return call(xa.functional.nest(flat), given)


def in_float64(params, texts, pictures, boxes, valid):
    """Logits of a SelfDoc, each page without its padding; those of padding are 0."""
    p, dense, found = params, oracle._dense, np.zeros((*valid.shape, 5))
    for row, there in enumerate(valid):
        sides = []
        for side, given in ((p["text"], texts), (p["picture"], pictures)):
            x = dense(side["features"], given[row, there]) + dense(side["box"], boxes[row, there])
            x = oracle.norm(side["norm"], x)[None]
            sides.append(oracle.block(side["stack"]["layers"]["0"], x, act="gelu"))
        L, V, *_ = in_numpy(p, *sides)
        L, V = oracle.norm(p["text"]["output_norm"], L), oracle.norm(p["picture"]["output_norm"], V)
        gate = 1 / (1 + np.exp(-dense(p["gate"], np.concatenate([L, V], -1))))
        x = oracle.norm(p["norm"], gate * L + (1 - gate) * V)
        found[row, there] = dense(p["output"]["linear"], x)[0]
    return found


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", FILES)
def test_it_is_the_librarys_model(name):
    (params, call), given = program(name), PROGRAMS[name][1]
    close(call(given), by_the_library(name, params, given), ulps=1000)


def test_a_page_is_read_as_in_numpy_without_its_padding():
    (params, call), given = program("selfdoc"), PROGRAMS["selfdoc"][1]
    close(call(given)[VALID], in_float64(params, **given)[VALID], ulps=1000)


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATES)
def test_what_it_says_through_its_states_is_what_whole_texts_say(name):
    """Rows are padded, beams go on from one another, and rows go back, where the states can."""
    (build, given), (params, call), J = PROGRAMS[name], program(name), 2
    said = "tokens" if "tokens" in given else "target_in"
    tokens = RNG.integers(3, V, (B, J, T)).astype(np.int32)
    parents, cached = np.array([[1, 0], [0, 0], [1, 1]]), not name.startswith("recurrent")
    asked = {} if name == "llava" else dict(return_weights=True)
    padding, lengths = ([0, 1, 2], [7, 6, 5]) if cached else ([0] * B, [7] * B)

    @jax.jit
    def steps(params, tokens, parents, padding, lengths, inputs):
        model = xa.functional.bind(build, params)
        states = model.prefill(B, J, T, **inputs)
        if cached:
            states = states.pad_left(padding)
        first, states, *weights = model.decode_step(tokens[..., :7], states, **asked)
        states = states.select(parents)
        if cached:
            _, states = model.decode_step(tokens[..., :2], states)
            states = states.rewind(lengths)
        read = lambda states, t: model.decode_step(t[..., None], states)[::-1]  # noqa: E731
        _, later = jax.lax.scan(read, states, tokens[..., 7:].transpose(2, 0, 1))
        return first, later[..., 0, :].transpose(1, 2, 0, 3), weights

    inputs = {key: x for key, x in given.items() if key != said}
    rows = np.array(padding), np.array(lengths)
    first, later, weights = steps(params, tokens, parents, *rows, inputs)
    for read in weights:  # [L B J N T S]; a local attention has nothing to read far from the source
        np.testing.assert_allclose(read[..., :2, :].sum(-1), 1, rtol=1e-5)
    for j in range(J):
        begun, gone_on = np.zeros((2, B, T), np.int32)  # what comes later changes nothing before
        for row, (pad, length) in enumerate(zip(padding, lengths, strict=True)):
            begun[row, : 7 - pad] = tokens[row, j, pad:7]
            past = tokens[row, parents[row, j], pad:length]
            gone_on[row, : length - pad + 3] = [*past, *tokens[row, j, 7:]]
        begun, gone_on = (call(given | {said: text}) for text in (begun, gone_on))
        for row, (pad, length) in enumerate(zip(padding, lengths, strict=True)):
            close(first[row, j, pad:], begun[row, : 7 - pad], ulps=2000)
            close(later[row, j], gone_on[row, length - pad :][:3], ulps=2000)
