"""Caches are written where they lie: read off the compiled text, for a step and for the loop of a search."""

import jax
import jax.numpy as jnp
import pytest

import crossattn as xa
from crossattn.decode import generate
from crossattn.models import Transformer, transformer
from experiments.plan.hlo import Module, body_of

B, S, LENGTH, DIM = 8, 16, 64, 32
SCANNED = pytest.mark.parametrize("scan", [False, True], ids=["looped", "scanned"])
READ = dict(source=jnp.ones((B, S), jnp.int32))


def made(scan):
    block = xa.nn.BlockConfig.of(dim=DIM, num_heads=2, mlp_dim=64)
    config = transformer.tiny(block=block, scan=scan, pad_id=0)
    build = lambda rngs: Transformer(config, rngs=rngs)  # noqa: E731
    return build, xa.functional.init(build, jax.random.key(0))


def bytes_of(states):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))


@SCANNED
def test_states_that_a_step_is_given_are_those_that_it_gives(scan):
    build, params = made(scan)
    bind = lambda p: xa.functional.bind(build, p)  # noqa: E731
    states = jax.jit(lambda p: bind(p).prefill(B, 1, LENGTH, **READ))(params)
    tokens = jnp.ones((B, 1, 1), jnp.int32)
    leaves, form = jax.tree.flatten(states)

    def step(params, tokens, leaves):
        logits, states = bind(params).decode_step(tokens, form.unflatten(leaves))
        return logits, jax.tree.leaves(states)

    compiled = jax.jit(step, donate_argnums=2).lower(params, tokens, leaves).compile()
    one = bytes_of(states.layers[0].cache)
    said = compiled.memory_analysis()
    assert said.alias_size_in_bytes == bytes_of(states)
    assert said.temp_size_in_bytes < one
    assert not copies(compiled, one // 2)


@pytest.mark.quick(2)
@SCANNED
@pytest.mark.parametrize("num_beams", [1, 2], ids=["greedy", "beams"])
def test_no_token_copies_a_cache(scan, num_beams):
    build, params = made(scan)

    def search(params, read):
        model = xa.functional.bind(build, params)
        return generate(model, **read, max_new_tokens=LENGTH, num_beams=num_beams)

    compiled = jax.jit(search).lower(params, READ).compile()
    cache = B * num_beams * LENGTH * DIM * 4
    assert not copies(compiled, cache, loop=True)


def copies(compiled, size, loop=False):
    """Copies of that size or more in a program, or in the loops that it begins."""
    module = Module(compiled.as_text())
    entry = module.computations[module.entry].instructions.values()
    bodies = [body_of(i) for i in entry if i.opcode == "while"] if loop else [module.entry]
    assert bodies
    return [
        (run.instruction.name, run.instruction.shape)
        for body in bodies
        for run in module.runs(body)
        if run.instruction.opcode in ("copy", "copy-start")
        and sum(x.bytes for x in run.instruction.arrays) >= size
    ]
