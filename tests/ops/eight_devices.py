"""A program for eight virtual CPU devices: prints what is wrong with each case, "" for nothing."""

import functools
import json
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import crossattn as xa
from crossattn import testing
from tests.closeness import close

KINDS = {"": AxisType.Auto, "explicit ": AxisType.Explicit}


def attends():
    """attend_sharded over all eight devices, either way, on either kind of mesh."""
    found = {}
    for name, kind in KINDS.items():
        mesh = jax.make_mesh((8,), ("seq",), (kind,))
        for strategy in ("merge", "ring"):
            options = dict(mesh=mesh, axis="seq", strategy=strategy)
            found[name + strategy] = functools.partial(xa.attend_sharded, **options)
    return found


def batch_over_other_devices(way):
    """Batch and memory split over two mesh axes, inside jit, with a traced scale and the lse."""
    kind, strategy = AxisType.Explicit if "explicit" in way else AxisType.Auto, way.split()[-1]
    mesh = jax.make_mesh((2, 4), ("data", "seq"), (kind,) * 2)
    draw = np.random.default_rng(0).normal
    q, k, v = (np.float32(draw(size=(2, length, 2, 4))) for length in (8, 12, 12))
    split = NamedSharding(mesh, PartitionSpec("data", "seq"))
    sharded = functools.partial(xa.attend_sharded, mesh=mesh, axis="seq", strategy=strategy)

    def loss(attend, *arrays):
        *qkv, scale = arrays
        out, lse = attend(*qkv, xa.masks.window(3), scale=scale, return_lse=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    def run(attend, *arrays):
        call = jax.jit(jax.value_and_grad(functools.partial(loss, attend), (0, 1, 2, 3)))
        return call(*arrays, jnp.float32(0.6))

    found = run(sharded, *(jax.device_put(x, split) for x in (q, k, v)))
    close(found, run(xa.attend, q, k, v))
    out = jax.jit(sharded)(*(jax.device_put(x, split) for x in (q, k, v)))
    wanted = PartitionSpec(None, "seq") if strategy == "ring" else PartitionSpec()
    parts = {shard.data.shape[1] for shard in out.addressable_shards}
    assert parts == {2 if strategy == "ring" else 8}, f"{out.sharding}, expected {wanted}"


def statistics():
    """attention_stats of examples, heads and queries on Explicit axes, and the gradient of a few."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "tensor", "seq"))
    draw = np.random.default_rng(0).normal
    q, k = (np.float32(draw(size=(2, length, heads, 4))) for length, heads in ((6, 4), (9, 2)))
    spans = np.zeros((2, 6), np.int32), np.full((2, 6), 4, np.int32)

    def stats(q, k, *spans):
        mask = xa.masks.causal(offset=2) & xa.masks.lengths(8)
        return xa.attention_stats(q, k, mask, top_k=2, spans=spans)

    def loss(q, k, *spans):
        found = stats(q, k, *spans)
        return jnp.sum(jnp.sin(found.entropy)) + jnp.sum(jnp.sin(found.mass))

    def run(*arrays):
        return jax.jit(stats)(*arrays), jax.jit(jax.grad(loss, (0, 1)))(*arrays)

    specs = ("data", "seq", "tensor"), ("data", None, "tensor"), ("data", "seq"), ("data",)
    placed = (
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in zip((q, k, *spans), specs, strict=True)
    )
    alone = run(q, k, *spans)
    for mine, one in zip(*map(jax.tree.leaves, (run(*placed), alone)), strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-4, atol=1e-5)


def parts_of_unlike_places():
    """merge of two parts that are split in different ways, on Explicit axes, outside jit."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    draw = np.random.default_rng(0).normal
    parts = [np.float32(draw(size=shape)) for shape in ((4, 3, 2, 5), (4, 2, 3)) * 2]
    specs = ("data", None, "tensor"), ("data",), (None, None, "tensor"), (None, "tensor")
    placed = [
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        for x, spec in zip(parts, specs, strict=True)
    ]
    for mine, one in zip(xa.merge(*placed), xa.merge(*parts), strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-5, atol=1e-6)


def inside_shard_map_is_refused():
    """Over the axis of attend_sharded itself arrays are parts, and it takes whole ones."""
    mesh = jax.make_mesh((8,), ("seq",))
    x = jax.device_put(jnp.ones((1, 8, 1, 4)), NamedSharding(mesh, PartitionSpec(None, "seq")))
    call = functools.partial(xa.attend_sharded, mesh=mesh, axis="seq")
    spec = PartitionSpec(None, "seq")
    try:
        jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(x, x, x)
    except ValueError as error:
        assert "'seq' is manual here" in str(error), error
    else:
        raise AssertionError("it was answered")


def forward_mode(strategy):
    """Along one way, through all eight devices, and the second derivative along it too."""
    attend = attends()[strategy]
    draw = np.random.default_rng(1).normal
    at = tuple(np.float32(draw(size=(1, length, 2, 4))) for length in (8, 16, 16))
    way = tuple(np.float32(draw(size=x.shape)) for x in at)

    def slope(attend, *at):
        def loss(*at):
            out, lse = attend(*at, xa.masks.window(9), return_lse=True)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

        return jax.jvp(loss, at, way)[1]

    def twice(attend, *at):
        return jax.jvp(functools.partial(slope, attend), at, way)

    found, expected = (jax.jit(functools.partial(twice, one))(*at) for one in (attend, xa.attend))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def kernels_for_tpu(strategy):
    """Each device runs splash attention, forward and back, where the program is lowered for TPUs."""
    mesh = jax.make_mesh((8,), ("seq",))
    place = NamedSharding(mesh, PartitionSpec(None, "seq"))
    x = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16, sharding=place)
    sharded = functools.partial(xa.attend_sharded, mesh=mesh, axis="seq", strategy=strategy)

    def loss(q, k, v):
        return sharded(q, k, v, xa.masks.causal()).astype(jnp.float32).sum()

    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # attend says it where plain JAX runs
        text = step.trace(x, x, x).lower(lowering_platforms=("tpu",)).as_text()
    names = set(re.findall('kernel_name = "splash_mha_([a-z]*)', text))
    assert names == {"fwd", "dq", "dkv"}, names


def fault(check, *arguments):
    try:
        check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}" or "failed"
    return ""


def main(chosen):
    cases = testing.cases()
    found = {
        f"{strategy} {name}": fault(testing.check, attend, cases[name])
        for strategy, attend in attends().items()
        for name in chosen[strategy]
    }
    for way in attends():
        found[f"{way} two axes"] = fault(batch_over_other_devices, way)
    for strategy in ("merge", "ring"):
        found[f"{strategy} forward mode"] = fault(forward_mode, strategy)
        found[f"{strategy} kernels"] = fault(kernels_for_tpu, strategy)
    for check in (statistics, parts_of_unlike_places, inside_shard_map_is_refused):
        found[check.__name__] = fault(check)
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
