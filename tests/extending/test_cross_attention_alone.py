"""A model learns another language by its cross-attention alone: nothing else is trained, stored or sent.

Source: Gheini, Ren and May 2021, "Cross-Attention is All You Need: Adapting Pretrained Transformers for
Machine Translation".
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossattn as xa
from crossattn.functional import flatten
from crossattn.models import Transformer, transformer
from crossattn.train import trainable
from crossattn.train.losses import cross_entropy
from crossattn.weights import deltas

CONFIG = transformer.tiny(vocab_size=20, encoder_layers=1, decoder_layers=1)
BOS, LENGTH = 1, 5


def build(rngs):
    return Transformer(CONFIG, rngs=rngs)


def pairs(key, shift):
    """The parent's task copies a source; the child's ``shift`` takes it from so many places further on."""
    source = jax.random.randint(key, (64, LENGTH), 3, 20)
    return source, jnp.roll(source, -shift, axis=1)


def loss(params, source, target):
    target_in = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
    logits = xa.apply(build, params, source, target_in)
    return cross_entropy(logits, target, jnp.ones(target.shape))[0] / target.size


def fitted(params, pattern, shift, steps=300):
    """Parameters after training those that the pattern finds; the others have no gradient."""
    names = trainable.trained_names(xa.functional.logical_axes(build), pattern)
    own, frozen = trainable.split(params, names)
    optimiser = optax.adam(optax.cosine_decay_schedule(5e-3, steps))

    @jax.jit
    def run(own, frozen):
        def step(carry, key):
            batch = pairs(key, shift)
            whole = lambda own: loss(trainable.join(own, frozen), *batch)  # noqa: E731
            updates, state = optimiser.update(jax.grad(whole)(carry[0]), carry[1])
            return (optax.apply_updates(carry[0], updates), state), None

        keys = jax.random.split(jax.random.key(shift), steps)
        return jax.lax.scan(step, (own, optimiser.init(own)), keys)[0]

    own, state = run(own, frozen)
    of_adam = flatten(state[0].mu)
    assert of_adam.keys() == flatten(own).keys()
    return trainable.join(own, frozen), of_adam


@pytest.mark.slow
def test_cross_attention_alone_learns_another_task_and_is_all_that_a_delta_stores(tmp_path):
    parent, _ = fitted(xa.init(build, jax.random.key(0)), None, shift=0)
    child, state = fitted(parent, "[.]cross[.]", shift=1)
    measure, unseen = jax.jit(loss), jax.random.key(99)
    before, after = (float(measure(p, *pairs(unseen, 1))) for p in (parent, child))
    assert float(measure(parent, *pairs(unseen, 0))) < 0.2
    assert after < 1.4 < np.log(17) < before  # a guess is one of 17 tokens

    old, new = flatten(parent), flatten(child)
    changed = {name for name, x in new.items() if np.any(x != old[name])}
    # A bias of keys moves all logits of a query alike.
    crossing = {name for name in new if ".cross." in name}
    assert changed <= crossing == state.keys() and crossing - changed <= {
        name for name in crossing if name.endswith("key.bias")
    }

    file = deltas.write(tmp_path / "child.safetensors", child, parent)
    delta = deltas.read(file)
    assert delta.changed.keys() == changed
    assert deltas.share(delta, parent) == sum(new[name].size for name in changed) / sum(
        x.size for x in new.values()
    )
    for name, x in flatten(delta.applied(parent)).items():
        np.testing.assert_array_equal(x, new[name])
