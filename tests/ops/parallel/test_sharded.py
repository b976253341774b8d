"""Attention over a memory that lies on several devices is attention on one."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import crossattn as xa
from crossattn.ops.masks import slices
from crossattn.ops.parallel.sharded import plan
from tests.conftest import on_eight_devices

# Five queries and seven keys for eight devices: lengths are padded, and a device may hold no real key.
CASES = {
    "merge": [
        "causal", "window", "key_and_query_lengths", "segments", "explicit_and_causal",
        "some_rows_read_nothing", "bias_and_mask", "bfloat16_many_keys",
    ],
    "ring": [
        "causal_with_offset_per_example", "causal_by_positions", "window", "key_and_query_lengths",
        "key_padding", "segments", "causal_or_prefix", "explicit_and_causal", "some_rows_read_nothing",
        "bias_and_mask", "bias_1x4x1x1", "nan_beyond_the_last_query", "two_batch_axes_padded",
    ],
    "explicit merge": ["key_and_query_lengths", "bias_and_mask"],
    "explicit ring": ["segments"],
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    said = on_eight_devices("-m", "tests.ops.eight_devices", json.dumps(CASES))
    return json.loads(said.splitlines()[-1])


@pytest.mark.parametrize("run", [f"{way} {name}" for way in CASES for name in CASES[way]])
def test_eight_devices_give_the_oracles_outputs_and_gradients(found, run):
    assert found[run] == ""


@pytest.mark.parametrize("strategy", CASES)
def test_other_mesh_axes_keep_the_batch(found, strategy):
    assert found[f"{strategy} two axes"] == ""


@pytest.mark.parametrize(
    "check", ["statistics", "parts_of_unlike_places", "inside_shard_map_is_refused"]
)
def test_explicit_mesh_axes_change_nothing(found, check):
    assert found[check] == ""


@pytest.mark.parametrize("strategy", ["merge", "ring"])
def test_on_tpus_every_device_runs_a_fused_kernel_forward_and_back(found, strategy):
    assert found[f"{strategy} kernels"] == ""


@pytest.mark.parametrize("strategy", ["merge", "ring"])
def test_forward_mode_goes_over_devices(found, strategy):
    assert found[f"{strategy} forward mode"] == ""


def shapes(T, S, N=16, K=8, H=128, dtype=jnp.bfloat16):
    lead = [(1, T, N, H), (1, S, K, H), (1, S, K, H)]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in lead]


def test_few_queries_of_a_long_memory_are_merged_and_many_go_round_a_ring():
    decoding = plan(*shapes(T=1, S=131072), devices=8)
    assert decoding.strategy == "merge" and decoding.merge_bytes * 1000 < decoding.ring_bytes
    assert plan(*shapes(T=131072, S=131072), devices=8).strategy == "ring"


def test_the_plan_counts_the_bytes_that_a_device_sends():
    found = plan(*shapes(T=16, S=4096), devices=8)
    block = 4096 // 8 * 8 * 128 * 2  # of keys, or of values, in bytes
    assert found.ring_bytes == 7 * 2 * block
    gathered, reduced = 16 * 16 * 128 * 2, 16 * 16 * (128 + 2) * 4
    assert found.merge_bytes == 7 * (gathered + 2 * reduced) // 8
    assert plan(*shapes(T=16, S=4096), devices=1).ring_bytes == 0


T, S = 6, 9


def every_mask():
    m, draw = xa.masks, np.random.default_rng(0)
    q_positions, k_positions = draw.integers(0, 9, (2, T)), draw.integers(0, 9, (2, S))
    yield "nothing", m.Mask(())
    yield "causal", m.causal()
    yield "offset", m.causal(offset=np.array([1, -2]))
    yield "window", m.window(2, 1, offset=1)
    yield "q_positions", m.causal(q_positions=q_positions)
    yield "k_positions", m.window(3, 0, offset=2, k_positions=k_positions)
    yield "positions", m.causal(q_positions=q_positions, k_positions=k_positions)
    yield "lengths", m.lengths(np.array([4, 8]), np.array([2, 6]))
    yield "lengths_of_ints", m.lengths(7, 5)
    yield "padding", m.key_padding(draw.random((2, S)) < 0.5)
    yield "segments", m.segments(draw.integers(0, 3, (2, T)), draw.integers(0, 3, (2, S)))
    yield "explicit", m.explicit(draw.random((2, 3, T, S)) < 0.5)
    yield "explicit_rows", m.explicit(draw.random((2, 1, T, 1)) < 0.5)
    yield "explicit_columns", m.explicit(draw.random((2, 1, 1, S)) < 0.5)
    either = m.causal() | m.key_padding(draw.random((2, S)) < 0.5)
    yield "either_and_lengths", either & m.lengths(8)


@pytest.mark.parametrize("mask", [pytest.param(mask, id=name) for name, mask in every_mask()])
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


def test_what_it_cannot_do_is_said(arrays, in_production):
    call = functools.partial(xa.attend_sharded, *arrays, mesh=one_device())
    with pytest.raises(NotImplementedError, match="no device of attend_sharded has the weights"):
        call(axis="seq", return_weights=True)
    with pytest.raises(NotImplementedError, match="depend on how many devices"):
        call(axis="seq", dropout_rate=0.1, dropout_key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"axis is 'rows'; expected one of the mesh's, \('seq',\)"):
        call(axis="rows")
    with pytest.raises(ValueError, match='strategy is \'star\'; expected "merge", "ring" or None'):
        call(axis="seq", strategy="star")
