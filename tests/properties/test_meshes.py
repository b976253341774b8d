"""Attention and a model on meshes of eight devices, with Auto and with Explicit axes, inside ``jax.set_mesh``
and outside: attention is the oracle's, the model gives what it gives on one device.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossattn as xa
from crossattn.models import Transformer, transformer
from crossattn.testing import checks, oracle
from tests.properties import examples, generators
from tests.properties.calls import biases, masks

pytestmark = pytest.mark.usefixtures("in_production")

SHAPES = {("data", "tensor"): (4, 2), ("seq",): (8,), ("data", "seq"): (2, 4), ("data",): (8,)}


@st.composite
def meshes(draw, axis=None):
    """(a mesh of eight devices, whether it is set), with an axis of that name where one is asked for."""
    names = draw(st.sampled_from([names for names in SHAPES if axis is None or axis in names]))
    kind = draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]))
    return jax.make_mesh(SHAPES[names], names, (kind,) * len(names)), draw(st.booleans())


@st.composite
def calls(draw, biased=True):
    """q, k and v whose batch, heads and lengths divide; mask and bias; the keys that may be read."""
    random, K, G = draw(generators), 2 * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    H, T, S = (
        draw(st.sampled_from([2, 4, 8])),
        8 * draw(st.integers(1, 3)),
        8 * draw(st.integers(1, 3)),
    )
    shapes = (8, T, K * G, H), (8, S, K, H), (8, S, K, H)
    arrays = tuple(np.float32(random.normal(size=shape)) for shape in shapes)
    mask, allowed = draw(masks((8,), K * G, T, S))
    bias = draw(st.none() | biases((8,), K * G, T, S)) if biased else None
    return arrays, mask, bias, np.broadcast_to(allowed, (8, K * G, T, S))


def inside(mesh, is_set):
    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def placed(mesh, spec, arrays):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def rows(mesh, *others):
    """Batch over "data" and later axes over those named, where the mesh has them."""
    return P(*(name if name in mesh.shape else None for name in ("data", *others)))


def alone(call):
    """Calls on one device, whatever mesh is set."""
    with jax.set_mesh(jax.make_mesh((1,), ("one",), (AxisType.Auto,), devices=jax.devices()[:1])):
        return jax.device_get(call())


def hold(attend, mesh, spec, arrays, allowed, bias=None):
    """Output and gradients are the oracle's."""

    def energy(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(jnp.sin(out)), out

    # Under jit: JAX itself refuses the gradient of a scalar on Explicit axes elsewhere.
    call = jax.jit(jax.grad(energy, argnums=(0, 1, 2), has_aux=True))
    gradients, out = call(*placed(mesh, spec, arrays))
    expected = oracle.attention(*arrays, allowed=allowed, bias=bias)[0]
    slopes = oracle.gradients(np.cos(expected), *arrays, allowed=allowed, bias=bias)
    checks.close(out, expected, "output")
    for name, gradient in zip("qkv", gradients, strict=True):
        checks.close(gradient, slopes[name], f"gradient of {name}", ulps=8)


@examples(4)
@given(on=meshes(), call=calls())
def test_attend_with_batch_and_heads_split(on, call):
    (mesh, _), (arrays, mask, bias, allowed) = on, call
    with inside(*on):
        attend = functools.partial(xa.attend, mask=mask, bias=bias)
        hold(attend, mesh, rows(mesh, None, "tensor"), arrays, allowed, bias)


@pytest.mark.parametrize("strategy", [None, "merge", "ring"])
@examples(2)
@given(on=meshes("seq"), call=calls(biased=False))
def test_attend_with_the_memory_split_along_its_length(strategy, on, call):
    (mesh, _), (arrays, mask, _, allowed) = on, call
    with inside(*on):
        attend = functools.partial(
            xa.attend_sharded, mask=mask, mesh=mesh, axis="seq", strategy=strategy
        )
        hold(attend, mesh, rows(mesh, "seq"), arrays, allowed)


@functools.cache
def translator():
    """(build, parameters) of a small Transformer."""
    build = lambda rngs: Transformer(transformer.tiny(), rngs=rngs)  # noqa: E731
    return build, alone(lambda: xa.init(build, jax.random.key(0)))


@pytest.mark.slow
@examples(4)
@given(on=meshes(), random=generators, gradients=st.booleans())
def test_logits_and_gradients_of_a_transformer(on, random, gradients):
    build, params = translator()
    source, target = (random.integers(3, 16, (8, n)).astype(np.int32) for n in (6, 5))
    batch = source, target, np.int32(np.arange(6) < random.integers(1, 7, (8, 1)))

    def logits(params, source, target, segment_ids):
        return xa.apply(build, params, source, target, source_segment_ids=segment_ids)

    def loss(params, *batch):
        return jnp.sum(jnp.tanh(logits(params, *batch)))

    hold_batch(jax.jit(jax.grad(loss) if gradients else logits), on, params, batch)


def hold_batch(call, on, params, batch, exact=False):
    """A call of parameters and a batch gives on a mesh what it gives on one device."""
    mesh, _ = on
    with inside(*on):
        expected = jax.tree.leaves(alone(lambda: call(params, *batch)))
        given_ = jax.device_put(params, NamedSharding(mesh, P()))
        found = jax.tree.leaves(call(given_, *placed(mesh, rows(mesh), batch)))
    if exact:
        return [np.testing.assert_array_equal(*pair) for pair in zip(found, expected, strict=True)]
    size = max(np.abs(leaf).max() for leaf in expected)  # the gradient of a bias of keys is 0
    for one, other in zip(found, expected, strict=True):
        checks.close(one, other, "logits or gradient", ulps=20, least=size)


@pytest.mark.slow
@examples(4)
@given(on=meshes(), random=generators, beams=st.sampled_from([1, 3]))
def test_texts_of_a_sharded_batch(on, random, beams):
    build, params = translator()
    options = {"max_new_tokens": 5, "num_beams": beams}
    call = jax.jit(
        lambda p, s: xa.decode.generate(xa.functional.bind(build, p), s, **options).tokens
    )
    hold_batch(call, on, params, (random.integers(3, 16, (8, 6)).astype(np.int32),), exact=True)
