"""Attention over a memory that lies on several devices is attention on one."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import crossattn as xa
from crossattn import testing
from crossattn.ops.masks import slices
from crossattn.ops.parallel.sharded import plan
from tests.closeness import close
from tests.ops.eight import mesh_of, needs_eight_devices, put
from tests.ops.masks.table import MASKS, S, T

# Five queries and seven keys for eight devices: lengths are padded, and a device may hold no real key.
CASES = {
    (AxisType.Auto, "merge"): [
        "key_and_query_lengths", "bias_and_mask", "causal", "window", "segments", "explicit_and_causal",
        "some_rows_read_nothing", "bfloat16_many_keys",
    ],
    (AxisType.Auto, "ring"): [
        "key_and_query_lengths", "bias_and_mask", "causal_with_offset_per_example", "causal_by_positions",
        "window", "key_padding", "segments", "causal_or_prefix", "explicit_and_causal",
        "some_rows_read_nothing", "bias_1x4x1x1", "nan_beyond_the_last_query", "two_batch_axes_padded",
    ],
    (AxisType.Explicit, "merge"): ["key_and_query_lengths", "bias_and_mask"],
    (AxisType.Explicit, "ring"): ["segments"],
}  # fmt: skip


def over_eight(kind, strategy):
    mesh = mesh_of(8, names=("seq",), kind=kind)
    return functools.partial(xa.attend_sharded, mesh=mesh, axis="seq", strategy=strategy)


@needs_eight_devices
@pytest.mark.parametrize(
    ("kind", "strategy", "name"),
    [
        pytest.param(kind, strategy, name, marks=[] if i < 2 else pytest.mark.slow)
        for (kind, strategy), names in CASES.items()
        for i, name in enumerate(names)
    ],
)
def test_eight_devices_give_the_oracles_outputs_and_gradients(kind, strategy, name):
    testing.check(over_eight(kind, strategy), testing.cases()[name])


@needs_eight_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mask_of_two_axes_is_that_of_all_heads_and_rows(kind):
    mesh = mesh_of(2, 4, names=("data", "seq"), kind=kind)
    q, k, v = (np.float32(np.random.default_rng(0).normal(size=(2, 8, 2, 4))) for _ in range(3))
    placed, mask = put(mesh, (q, k, v), ("data", None)), xa.masks.explicit(np.tri(8, dtype=bool))
    expected = xa.attend(q, k, v, xa.masks.causal())
    with jax.set_mesh(mesh):
        close(jax.jit(lambda *x: xa.attend(*x, mask))(*placed), expected)
    along = functools.partial(xa.attend_sharded, mesh=mesh, axis="seq")
    placed = put(mesh, (q, k, v), ("data", "seq"))
    close(jax.jit(lambda *x: along(*x, mask))(*placed), expected)


@needs_eight_devices
@pytest.mark.parametrize("strategy", ["merge", "ring"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_other_mesh_axes_keep_the_batch(kind, strategy):
    """Batch and memory split over two mesh axes, inside jit, with a traced scale and the lse."""
    mesh = mesh_of(2, 4, names=("data", "seq"), kind=kind)
    draw = np.random.default_rng(0).normal
    q, k, v = (np.float32(draw(size=(2, length, 2, 4))) for length in (8, 12, 12))
    placed = put(mesh, (q, k, v), ("data", "seq"))
    sharded = functools.partial(xa.attend_sharded, mesh=mesh, axis="seq", strategy=strategy)

    def loss(attend, *arrays):
        *qkv, scale = arrays
        out, lse = attend(*qkv, xa.masks.window(3), scale=scale, return_lse=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    def run(attend, *arrays):
        call = jax.jit(jax.value_and_grad(functools.partial(loss, attend), (0, 1, 2, 3)))
        return call(*arrays, jnp.float32(0.6))

    found = run(sharded, *placed)
    close(found, run(xa.attend, q, k, v))
    out = jax.jit(sharded)(*placed)
    parts = {shard.data.shape[1] for shard in out.addressable_shards}
    assert parts == {2 if strategy == "ring" else 8}, out.sharding


@pytest.mark.slow
@needs_eight_devices
def test_statistics_on_explicit_axes_are_those_of_one_device():
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
    placed = put(mesh, (q, k, *spans), *specs)
    alone = run(q, k, *spans)
    for mine, one in zip(*map(jax.tree.leaves, (run(*placed), alone)), strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@needs_eight_devices
def test_parts_of_unlike_places_merge():
    """merge of two parts that are split in different ways, on Explicit axes, outside jit."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"))
    draw = np.random.default_rng(0).normal
    parts = [np.float32(draw(size=shape)) for shape in ((4, 3, 2, 5), (4, 2, 3)) * 2]
    specs = ("data", None, "tensor"), ("data",), (None, None, "tensor"), (None, "tensor")
    found = xa.merge(*put(mesh, parts, *specs))
    for mine, one in zip(found, xa.merge(*parts), strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-5, atol=1e-6)


@needs_eight_devices
def test_inside_shard_map_over_its_axis_it_says_that_arrays_are_parts():
    mesh, spec = jax.make_mesh((8,), ("seq",)), PartitionSpec(None, "seq")
    x = jax.device_put(jnp.ones((1, 8, 1, 4)), NamedSharding(mesh, spec))
    call = functools.partial(xa.attend_sharded, mesh=mesh, axis="seq")
    with pytest.raises(ValueError, match="'seq' is manual here"):
        jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(x, x, x)


@needs_eight_devices
@pytest.mark.parametrize("strategy", ["merge", pytest.param("ring", marks=pytest.mark.slow)])
def test_forward_mode_and_a_second_derivative_go_over_devices(strategy):
    attend = over_eight(AxisType.Auto, strategy)
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


@needs_eight_devices
@pytest.mark.parametrize("strategy", ["merge", "ring"])
def test_on_tpus_every_device_runs_a_fused_kernel_forward_and_back(strategy):
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


def shapes(T, S, N=16, K=8, H=128, dtype=jnp.bfloat16):
    lead = [(1, T, N, H), (1, S, K, H), (1, S, K, H)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in lead]


def test_the_plan_counts_the_bytes_that_a_device_sends_and_takes_the_fewer():
    found = plan(*shapes(T=16, S=4096), devices=8)
    block = 4096 // 8 * 8 * 128 * 2  # of keys, or of values, in bytes
    assert found.ring_bytes == 7 * 2 * block
    gathered, reduced = 16 * 16 * 128 * 2, 16 * 16 * (128 + 2) * 4
    assert found.merge_bytes == 7 * (gathered + 2 * reduced) // 8
    assert found.strategy == "merge"
    assert plan(*shapes(T=16, S=4096), devices=1).ring_bytes == 0
    assert plan(*shapes(T=131072, S=131072), devices=8).strategy == "ring"


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("traced", [False, True])
def test_a_part_of_a_mask_is_that_part_of_its_matrix(mask, traced):
    first_query, queries, first_key, keys = 2, 3, 4, 5
    whole = np.asarray(mask.materialize(T, S))[..., 2:5, 4:9]

    def cut(first_query, first_key):
        part = slices.part(mask, (first_query, queries), (first_key, keys))
        return part.materialize(queries, keys)

    found = (jax.jit(cut) if traced else cut)(first_query, first_key)
    np.testing.assert_array_equal(found, whole)


def test_a_part_of_a_mask_keeps_its_terms():
    mask = xa.masks.causal() & xa.masks.lengths(7)
    kinds = [type(term) for term in slices.part(mask, (2, 3), (4, 5)).terms]
    assert kinds == [type(term) for term in mask.terms], "a matrix was made"


@pytest.fixture
def arrays():
    draw = np.random.default_rng(0).normal
    return [jnp.asarray(draw(size=(1, n, 2, 4)), jnp.float32) for n in (T, S, S)]


def one_device():
    return jax.make_mesh((1,), ("seq",), (AxisType.Auto,), devices=jax.devices()[:1])


def test_without_a_mesh_or_on_one_device_it_is_attend(arrays):
    expected = xa.attend(*arrays, xa.masks.causal())
    for mesh in (None, one_device()):
        found = xa.attend_sharded(*arrays, xa.masks.causal(), mesh=mesh, axis="seq")
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"return_weights": True}, NotImplementedError, "no device of .* has the weights"),
        ({"dropout_rate": 0.1}, NotImplementedError, "depend on how many devices"),
        ({"axis": "rows"}, ValueError, r"axis is 'rows'; expected one of the mesh's, \('seq',\)"),
        ({"strategy": "star"}, ValueError, 'is \'star\'; expected "merge", "ring" or None'),
    ],
)
def test_what_it_cannot_do_is_said(arrays, in_production, options, error, said):
    with pytest.raises(error, match=said):
        xa.attend_sharded(*arrays, **{"mesh": one_device(), "axis": "seq", **options})
