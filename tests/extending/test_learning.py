"""Programs learn tasks made by code, to half of the loss of the best model that does not see the source."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossattn as xa
from crossattn.train.losses import cross_entropy

from .captioner import Captioner
from .crossvit import CrossViT
from .llava import Llava
from .pointer import Pointer
from .recurrent import Recurrent
from .selfdoc import SelfDoc

B, S, COLOURS, WORDS = 64, 5, 8, 256
BOS, FIRST = 1, 3  # words are FIRST, FIRST + 1, ...
SIZE = FIRST + COLOURS


def draw(key, below, *shape):
    return jax.random.randint(key, (B, *shape), 0, below)


def read_by(labels):
    """What a decoder reads to say the labels [B T]."""
    return jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)


def picture(colours):
    """Pictures [B 8 8 3] of four squares of these colours [B 4], 0 to 7 by bits."""
    bits = (colours[..., None] >> jnp.arange(3) & 1).reshape(B, 2, 2, 3)
    return jnp.kron(bits, jnp.ones((1, 4, 4, 1))) - 0.5


def textures(key):
    """One side of a picture is brighter, and stripes of a pixel are upright or lie: four classes."""
    keys = jax.random.split(key, 3)
    side, lies = draw(keys[0], 2), draw(keys[1], 2)
    bright = jnp.sign(3.5 - jnp.arange(8)) * (2 * side - 1)[:, None]
    stripes = (-1.0) ** jnp.arange(8)
    stripes = jnp.where(lies[:, None, None], stripes[:, None], stripes)
    x = bright[:, None] + stripes + 0.3 * jax.random.normal(keys[2], (B, 8, 8))
    return (x[..., None],), 2 * side + lies, jnp.ones(B)


def captions(key):
    """The colours of a picture's squares, row by row."""
    colours = draw(key, COLOURS, 4)
    labels = FIRST + colours
    return (picture(colours), read_by(labels)), labels, jnp.ones(labels.shape)


def answers(key):
    """A text has a picture somewhere, and then its colours, which count alone."""
    keys = jax.random.split(key)
    colours, places = draw(keys[0], COLOURS, 4), draw(keys[1], 4, 1)
    number = jnp.arange(11) + 1 - places - 4  # of the colour that a token is to say
    counted = (number >= 0) & (number < 4)
    labels = FIRST + jnp.take_along_axis(colours, jnp.clip(number, 0, 3), axis=1)
    tokens = read_by(jnp.where(counted, labels, BOS))
    return (tokens, picture(colours)[:, None], places), labels, counted


def agreements(key):
    """Whether a region's text and its picture have the same of two signs; either alone says nothing."""
    keys = jax.random.split(key, 4)
    texts, pictures = (jax.random.rademacher(own, (B, S, 4), jnp.float32) for own in keys[:2])
    boxes, valid = jax.random.uniform(keys[2], (B, S, 4)), jnp.arange(S) <= draw(keys[3], S, 1)
    labels = (texts[..., 0] == pictures[..., 0]).astype(jnp.int32)
    return (texts, pictures, boxes, valid), labels, valid


def backwards(key):
    """Texts of unlike lengths from their end to their beginning."""
    keys = jax.random.split(key)
    last = draw(keys[0], S, 1)
    source = jnp.where(jnp.arange(S) <= last, FIRST + draw(keys[1], COLOURS, S), 0)
    labels = jnp.take_along_axis(source, jnp.maximum(last - jnp.arange(S), 0), axis=1)
    return (source, read_by(labels)), labels, source > 0


def copies(key, first=FIRST):
    """Texts of words from ``first`` on, once more."""
    source = first + draw(key, WORDS, S)
    return (source, read_by(source)), source, jnp.ones(source.shape)


# How to build each program, its task, and the loss of the best model that reads nothing, or half of a page.
TASKS = {
    "crossvit": (
        lambda rngs: CrossViT((16, 16), (2, 4), (8, 8), 4, channels=1, stages=1, rngs=rngs),
        textures,
        np.log(4),
    ),
    "captioner": (
        lambda rngs: Captioner(SIZE, 16, 24, (8, 8), layers=1, rngs=rngs),
        captions,
        np.log(COLOURS),
    ),
    "llava": (
        lambda rngs: Llava(SIZE, 32, 24, (8, 8), layers=1, rngs=rngs),
        answers,
        np.log(COLOURS),
    ),
    "selfdoc": (lambda rngs: SelfDoc(16, 4, 4, 2, rngs=rngs), agreements, np.log(2)),
    "recurrent": (
        lambda rngs: Recurrent(SIZE, SIZE, 32, rngs=rngs),
        backwards,
        np.log(COLOURS),
    ),
    "pointer": (
        lambda rngs: Pointer(FIRST + 2 * WORDS, 32, layers=1, rngs=rngs),
        copies,
        np.log(WORDS),
    ),
}


def loss(build, params, inputs, labels, counted):
    logits = xa.apply(build, params, *inputs)
    return cross_entropy(logits, labels, counted.astype(jnp.float32))[0] / counted.sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_it_learns_what_the_source_alone_says_and_each_parameter_does(name):
    build, task, blind = TASKS[name]
    # The pointer is asked to say words that it has never read or said.
    unseen = functools.partial(copies, first=FIRST + WORDS) if name == "pointer" else task
    optimiser, steps = optax.adam(5e-3), 30 if name == "pointer" else 120

    @jax.jit
    def fitted(keys):
        def step(carry, key):
            params, state = carry
            gradient = jax.grad(lambda params: loss(build, params, *task(key)))(params)
            updates, state = optimiser.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        before = xa.init(build, keys[0])
        began = before, optimiser.init(before)
        (after, _), _ = jax.lax.scan(step, began, jax.random.split(keys[1], steps))
        return before, after, loss(build, after, *unseen(keys[2]))

    before, after, found = fitted(jax.random.split(jax.random.key(0), 3))
    assert found < blind / 2
    changes = jax.tree.map(lambda old, new: np.any(old != new), before, after)
    for path, changed in xa.functional.flatten(changes).items():
        assert changed or path.endswith("key.bias"), path
