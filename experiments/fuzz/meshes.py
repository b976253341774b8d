"""Attention, modules and models on meshes of eight devices with Auto and with Explicit axes.

Each runs where its operands lie, under ``jax.jit`` and without, inside ``jax.set_mesh`` and outside.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import crossattn as xa
from crossattn.models import Transformer, transformer
from crossattn.testing import Broken, checks, oracle
from experiments.fuzz import Wrong
from experiments.fuzz.problems import describe, draw_bias, draw_mask

ABOUT = (
    "the same on eight devices, meshes with Auto and Explicit axes, batch, heads and length split"
)
NEEDS = ()
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}
SHAPES = {("data", "tensor"): (4, 2), ("seq",): (8,), ("data", "seq"): (2, 4), ("data",): (8,)}


def start(folder: Path) -> Callable[[np.random.Generator], None]:
    """One of the kinds below on one of the meshes, at random."""

    def case(random: np.random.Generator) -> None:
        kind = _KINDS[random.integers(len(_KINDS))]
        names = list(SHAPES)[random.integers(len(SHAPES))]
        axes = (AxisType.Auto, AxisType.Explicit)[random.integers(2)]
        mesh = jax.make_mesh(SHAPES[names], names, (axes,) * len(names))
        inside = bool(random.integers(2))
        said = (
            f"{kind.__name__} on {dict(mesh.shape)} {axes.name}{' in set_mesh' if inside else ''}"
        )
        with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
            try:
                kind(random, mesh)
            except (Wrong, Broken) as error:
                raise Wrong(f"{said}: {error}") from error
            except Exception as error:
                what = " ".join(str(error).split())
                raise Wrong(f"{said}: {type(error).__name__}: {what}") from error

    return case


def attend(random, mesh) -> None:
    """Output and gradients, batch over "data", heads over "tensor"."""
    arrays, options, allowed = _call(random, mesh)
    mask, bias = options
    spec = P(
        "data" if "data" in mesh.shape else None, None, "tensor" if "tensor" in mesh.shape else None
    )

    def energy(q, k, v):
        out = xa.attend(q, k, v, mask, bias=bias)
        return jnp.sum(jnp.sin(out)), out

    call = jax.grad(energy, argnums=(0, 1, 2), has_aux=True)
    # Not without jit: JAX itself refuses the gradient of a scalar on Explicit axes there.
    gradients, out = jax.jit(call)(*_placed(mesh, spec, arrays))
    _compare(out, gradients, arrays, allowed, bias, f"{_said(arrays)} {describe(mask)}")


def attend_sharded(random, mesh) -> None:
    """The memory split along its length, either way."""
    if "seq" not in mesh.shape:
        return attend(random, mesh)
    arrays, (mask, _), allowed = _call(random, mesh)
    strategy = (None, "merge", "ring")[random.integers(3)]
    spec = P("data" if "data" in mesh.shape else None, "seq")
    sharded = functools.partial(xa.attend_sharded, mesh=mesh, axis="seq", strategy=strategy)

    def energy(q, k, v):
        out = sharded(q, k, v, mask)
        return jnp.sum(jnp.sin(out)), out

    call = jax.grad(energy, argnums=(0, 1, 2), has_aux=True)
    gradients, out = jax.jit(call)(*_placed(mesh, spec, arrays))
    _compare(out, gradients, arrays, allowed, None, f"{strategy} {_said(arrays)} {describe(mask)}")


def statistics(random, mesh) -> None:
    """``attention_stats`` of sharded queries and keys."""
    (q, k, v), (mask, bias), allowed = _call(random, mesh)
    spec = P(
        "data" if "data" in mesh.shape else None, None, "tensor" if "tensor" in mesh.shape else None
    )
    call = _maybe_jit(random, lambda q, k: xa.attention_stats(q, k, mask, bias=bias))
    stats = call(*_placed(mesh, spec, (q, k)))
    weights = oracle.attention(q, k, v, allowed, bias)[1]
    checks.close(stats.maximum, weights.max(-1), "maximum")
    checks.close(stats.mass, weights.sum(-2), "mass", ulps=4)


def module(random, mesh) -> None:
    """MultiHeadAttention on sharded inputs gives what it gives on one device."""
    D, N = 16, 4
    made = lambda rngs: xa.nn.MultiHeadAttention(D, N, rope_base=10_000.0, rngs=rngs)  # noqa: E731
    own = _alone(lambda: xa.init(made, jax.random.key(1)))
    x = np.float32(random.normal(size=(8, 16, D)))
    spec = P("data" if "data" in mesh.shape else None, "seq" if "seq" in mesh.shape else None)
    call = _maybe_jit(random, lambda p, x: xa.apply(made, p, x, mask=xa.masks.causal()))
    expected = _alone(lambda: xa.apply(made, own, jnp.asarray(x), mask=xa.masks.causal()))
    checks.close(
        call(_replicated(mesh, own), *_placed(mesh, spec, (x,))), expected, "output", ulps=4
    )


@functools.cache
def _transformer() -> tuple[Any, Any]:
    """(build, parameters) of a small one."""
    build = lambda rngs: Transformer(transformer.tiny(), rngs=rngs)  # noqa: E731
    return build, _alone(lambda: xa.init(build, jax.random.key(0)))


def model(random, mesh) -> None:
    """A ``Transformer`` on a sharded batch: logits, or gradients."""
    build, params = _transformer()
    source, target = (random.integers(3, 16, (8, n)).astype(np.int32) for n in (6, 5))
    segment_ids = np.int32(np.arange(6) < random.integers(1, 7, (8, 1)))
    gradients = bool(random.integers(2))

    def logits(params, source, target, segment_ids):
        return xa.apply(build, params, source, target, source_segment_ids=segment_ids)

    def loss(params, *batch):
        return jnp.sum(jnp.tanh(logits(params, *batch)))

    call = jax.jit(jax.grad(loss) if gradients else logits)
    spec = P("data" if "data" in mesh.shape else None)
    batch = source, target, segment_ids
    expected = _alone(lambda: call(params, *batch))
    results = call(_replicated(mesh, params), *_placed(mesh, spec, batch))
    leaves = [jax.tree.leaves(tree) for tree in (results, expected)]
    size = max(np.abs(leaf).max() for leaf in leaves[1])  # the gradient of a bias of keys is 0
    for one, other in zip(*leaves, strict=True):
        checks.close(one, other, "gradient" if gradients else "logits", ulps=20, least=size)


def translate(random, mesh) -> None:
    """Texts of a sharded batch, greedily and by beams."""
    build, params = _transformer()
    source = random.integers(3, 16, (8, 6)).astype(np.int32)
    options: Any = {"max_new_tokens": 5, "num_beams": int(random.choice([1, 3]))}
    call = jax.jit(
        lambda p, s: xa.decode.generate(xa.functional.bind(build, p), s, **options).tokens
    )
    spec = P("data" if "data" in mesh.shape else None)
    expected = _alone(lambda: call(params, source))
    hypotheses = call(_replicated(mesh, params), *_placed(mesh, spec, (source,)))
    checks.expect(np.array_equal(hypotheses, expected), "the texts are others than on one device")


_KINDS = (attend,) * 3 + (attend_sharded,) * 3 + (statistics, module, model, translate)


def _call(random, mesh) -> tuple[Any, Any, Any]:
    """q, k and v whose batch, heads and lengths divide; mask and bias; what may be read."""
    K, G, H = (
        2 * int(random.integers(1, 3)),
        int(random.integers(1, 3)),
        int(random.choice([2, 4, 8])),
    )
    T, S = (8 * int(n) for n in random.integers(1, 4, 2))
    shapes = (8, T, K * G, H), (8, S, K, H), (8, S, K, H)
    arrays = tuple(np.float32(random.normal(size=shape)) for shape in shapes)
    mask, allowed = draw_mask(random, (8,), K * G, T, S)
    bias = draw_bias(random, (8,), K * G, T, S) if random.random() < 0.2 else None
    return arrays, (mask, bias), np.broadcast_to(allowed, (8, K * G, T, S))


def _compare(out, gradients, arrays: Any, allowed, bias, said) -> None:
    expected = oracle.attention(*arrays, allowed=allowed, bias=bias)[0]
    slopes = oracle.gradients(np.cos(expected), *arrays, allowed=allowed, bias=bias)
    try:
        checks.close(out, expected, "output")
        for name, gradient in zip("qkv", gradients, strict=True):
            checks.close(gradient, slopes[name], f"gradient of {name}", ulps=8)
    except Broken as broken:
        raise Broken(f"{said}: {broken}") from None


def _said(arrays) -> str:
    return f"q{list(arrays[0].shape)} k{list(arrays[1].shape)}"


def _placed(mesh: Mesh, spec: P, arrays) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def _replicated(mesh: Mesh, tree: Any) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, P()))


def _maybe_jit(random, call) -> Any:
    return jax.jit(call) if random.random() < 0.7 else call


def _alone(call) -> Any:
    """On one device, whatever mesh is set."""
    with jax.set_mesh(jax.make_mesh((1,), ("one",), (AxisType.Auto,), devices=jax.devices()[:1])):
        return jax.device_get(call())
