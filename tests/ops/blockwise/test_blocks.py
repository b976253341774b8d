"""The matrix in blocks: which of them are visited, and how lengths are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.ops.blockwise import blocks
from crossattn.ops.blockwise.blocks import Plan

PLAN = Plan(64, 64, 8, 8)
M = xa.masks


def visited(mask, plan=PLAN):
    """Bool [I J], from what the loop would do."""
    found = jax.device_get(jax.jit(lambda: blocks.visits(mask, plan))())
    seen = np.zeros(plan.shape, bool)
    for i, (order, count) in enumerate(zip(*found, strict=True)):
        assert sorted(order.tolist()) == list(range(plan.shape[1]))
        seen[i, order[:count]] = True
    return seen


def holds_something(mask, plan=PLAN):
    """Bool [I J], from the whole matrix."""
    matrix = np.asarray(mask.materialize(plan.T, plan.S)).reshape(-1, plan.T, plan.S).any(0)
    rows = [matrix[i : i + plan.queries] for i in range(0, plan.T, plan.queries)]
    starts = range(0, plan.S, plan.keys)
    return np.array([[row[:, j : j + plan.keys].any() for j in starts] for row in rows])


PACKED = np.repeat([1, 2, 3, 4], [10, 22, 24, 8])
EXACT = {
    "causal": M.causal(),
    "causal_with_offset": M.causal(offset=-20),
    "window": M.window(9, 0),
    "lengths": M.lengths(np.array([20, 33]), np.array([64, 9])),
    "prefix": M.causal() | M.prefix(30),
    "one_packed_row": M.segments(PACKED[None]),
    "padding": M.key_padding(np.arange(64) < 40),
    "explicit_positions": M.window(
        5, 0, q_positions=np.arange(64)[::-1], k_positions=np.arange(64)
    ),
    "nothing": M.lengths(0),
}


@pytest.mark.parametrize(
    ("mask", "plan"),
    [
        *(pytest.param(mask, PLAN, id=name) for name, mask in EXACT.items()),
        # Lengths that are no multiple of a block.
        *((M.window(9, 2), Plan(61, 53, *size)) for size in ((8, 16), (61, 9), (7, 53))),
    ],
)
def test_exactly_the_blocks_that_hold_something_are_visited(mask, plan):
    np.testing.assert_array_equal(visited(mask, plan), holds_something(mask, plan))


def test_no_block_that_holds_something_is_left_out():
    random = np.random.default_rng(0)
    segments = random.integers(0, 3, (2, 64))
    mask = M.segments(segments) & M.causal(offset=np.array([0, 5])) & M.key_padding(segments > 1)
    assert (visited(mask) >= holds_something(mask)).all()


def test_causal_costs_half_and_a_window_its_width():
    plan = Plan(1024, 1024, 32, 32)
    assert visited(M.causal(), plan).sum() == 32 * 33 / 2
    assert visited(M.window(63, 0), plan).sum() == 1 + 2 + 30 * 3
    packed = np.repeat(np.arange(1, 9), 128)[None]
    assert visited(M.segments(packed), plan).sum() == 8 * 4**2


def test_a_batch_visits_what_any_example_reads_and_nothing_to_skip_needs_no_list():
    both = M.lengths(np.array([8, 24]))
    np.testing.assert_array_equal(visited(both).sum(-1), 3)
    by_example = jax.vmap(lambda mask: blocks.visits(mask, PLAN).count, out_axes=None)(both)
    np.testing.assert_array_equal(by_example, 3)
    assert blocks.visits(None, PLAN) is None
    assert blocks.visits(M.explicit(np.ones((1, 1, 64, 64), bool)), PLAN) is None


@pytest.mark.parametrize(
    "mask", [None, M.causal(), M.window(7, 0)], ids=["none", "causal", "window"]
)
@pytest.mark.parametrize("length", [1, 63, 64, 511, 513, 5000, 1 << 20])
def test_lengths_are_cut_evenly(length, mask):
    plan = blocks.plan(length, length, rows=8, mask=mask, platform="cpu")
    for size, count in zip((plan.queries, plan.keys), plan.shape, strict=True):
        assert 1 <= size <= length
        assert size * count - length < 16 * count
        assert count <= 1024


def area(T, S, rows=8, mask=None, platform="cpu"):
    plan = blocks.plan(T, S, rows, mask, platform)
    return plan.queries * plan.keys


def test_many_heads_and_examples_make_blocks_small():
    for platform in ("cpu", "gpu"):
        assert area(4096, 4096, 512, platform=platform) < area(4096, 4096, 1, platform=platform)
    # However many rows there are, all their blocks together keep to a bound that does not grow with lengths.
    assert area(1 << 16, 1 << 16, rows=256) == area(4096, 4096, rows=256)


def test_blocks_are_small_where_small_ones_skip_more():
    packed = M.segments(jnp.ones((2, 4096), jnp.int32))
    for mask in (M.window(255, 0), packed, M.causal() & packed):
        assert area(4096, 4096, mask=mask) < area(4096, 4096)
    assert area(1024, 1024, mask=M.causal()) < area(1024, 1024)
    assert area(8192, 8192, mask=M.causal()) == area(8192, 8192)


def test_what_hides_the_same_keys_from_every_query_leaves_blocks_large():
    for mask in (M.lengths(jnp.array([9, 5])), M.key_padding(jnp.ones((2, 1024), bool))):
        assert area(1024, 1024, mask=mask) == area(1024, 1024)
        traced = jax.jit(lambda mask: jnp.int32(area(1024, 1024, mask=mask)))(mask)
        assert traced == area(1024, 1024)


def test_a_side_of_less_than_a_block_leaves_room_for_more_of_the_other():
    shapes = [(4096, 4096), (256, 8192), (8192, 256)]
    assert len({area(T, S) for T, S in shapes}) == 1
    assert area(64, 16384) == area(16384, 64) < area(4096, 4096)
