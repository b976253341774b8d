"""A memory that grows, joins and is shared reads like the whole that it was cut from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.testing.case import array
from tests.closeness import close

B, SIZE, K, H, HV, N = 2, 6, 2, 4, 3, 4
QUERIES = jnp.asarray(array("q", B, SIZE, N, H))
KEYS = jnp.asarray(array("k", B, SIZE, K, H))
VALUES = jnp.asarray(array("v", B, SIZE, K, HV))
attend = jax.jit(xa.attend)
append = jax.jit(xa.Memory.append)
WHOLE = attend(QUERIES, KEYS, VALUES, xa.masks.causal())


def empty(size=SIZE):
    return xa.Memory.empty((B,), size, K, H, value_dim=HV)


def filled(count, size=SIZE):
    return append(empty(size), KEYS[:, :count], VALUES[:, :count])


def may_read(memory):
    """Which keys one query may read: Bool [B S]."""
    mask = jax.jit(lambda memory: memory.mask().materialize(1, memory.size))(memory)
    return np.broadcast_to(mask, (B, 1, 1, memory.size))[:, 0, 0]


def read(memory, queries=QUERIES):
    return attend(queries, memory.keys, memory.values, memory.mask())


def test_a_memory_of_keys_and_values_is_all_readable():
    memory = xa.Memory(keys=KEYS, values=VALUES)
    assert memory.size == SIZE
    assert may_read(memory).all()
    close(read(memory), attend(QUERIES, KEYS, VALUES))


def test_an_invalid_key_may_not_be_read():
    valid = jnp.arange(SIZE) < jnp.array([[2], [5]])
    memory = xa.Memory(keys=KEYS, values=VALUES, valid=valid)
    np.testing.assert_array_equal(may_read(memory), valid)
    close(read(memory), attend(QUERIES, KEYS, VALUES, xa.masks.key_padding(valid)))


def test_an_empty_memory_has_its_size_and_nothing_to_read():
    memory = empty()
    assert memory.keys.shape == (B, SIZE, K, H) and memory.values.shape == (B, SIZE, K, HV)
    assert memory.size == SIZE and int(memory.length) == 0
    assert not may_read(memory).any()
    np.testing.assert_array_equal(read(memory), 0)


def test_values_are_as_wide_as_keys_and_float32_unless_said():
    memory = xa.Memory.empty((2, 3), 5, K, H)
    assert memory.values.shape == (2, 3, 5, K, H)
    assert memory.keys.dtype == memory.values.dtype == jnp.float32
    narrow = xa.Memory.empty((), 5, K, H, dtype=jnp.bfloat16)
    assert narrow.keys.shape == (5, K, H)
    assert narrow.keys.dtype == narrow.values.dtype == jnp.bfloat16


def test_a_filled_memory_is_the_whole():
    memory = filled(SIZE)
    assert int(memory.length) == SIZE
    np.testing.assert_array_equal(memory.keys, KEYS)
    np.testing.assert_array_equal(memory.values, VALUES)
    assert may_read(memory).all()


def test_only_what_was_appended_may_be_read():
    memory = append(filled(2), KEYS[:, 2:3], VALUES[:, 2:3])
    np.testing.assert_array_equal(may_read(memory), np.tile(np.arange(SIZE) < 3, (B, 1)))
    close(read(memory), attend(QUERIES, KEYS[:, :3], VALUES[:, :3]))


def test_appending_leaves_the_old_memory_as_it_was():
    before = filled(2)
    before.append(KEYS[:, 2:3], VALUES[:, 2:3])
    assert int(before.length) == 2
    np.testing.assert_array_equal(may_read(before), np.tile(np.arange(SIZE) < 2, (B, 1)))


def test_decoding_step_by_step_is_the_causal_whole():
    def step(memory, now):
        query, key, value = (x[:, None] for x in now)
        causal = xa.masks.causal(offset=memory.length, k_positions=memory.positions)
        memory = memory.append(key, value)
        out = attend(query, memory.keys, memory.values, memory.mask() & causal)
        return memory, out[:, 0]

    steps = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (QUERIES, KEYS, VALUES))
    memory, found = jax.jit(lambda memory: jax.lax.scan(step, memory, steps))(empty(SIZE))
    close(jnp.moveaxis(found, 0, 1), WHOLE)
    assert int(memory.length) == SIZE


@pytest.mark.parametrize("prompt", [1, 4])
def test_a_prompt_then_single_tokens_in_a_larger_cache_is_the_causal_whole(prompt):
    memory, found = empty(SIZE + 3), []
    for start, stop in [(0, prompt), *((t, t + 1) for t in range(prompt, SIZE))]:
        memory = append(memory, KEYS[:, start:stop], VALUES[:, start:stop])
        mask = memory.mask() & xa.masks.causal(offset=start)
        found.append(attend(QUERIES[:, start:stop], memory.keys, memory.values, mask))
    close(jnp.concatenate(found, axis=1), WHOLE)


def test_a_bare_memory_is_read_like_a_full_one():
    full, bare = (xa.Memory.empty((B,), SIZE + 2, K, H, HV, bare=bare) for bare in (False, True))
    for start, stop in ((0, 2), (2, 3), (3, SIZE)):
        full, bare = (append(x, KEYS[:, start:stop], VALUES[:, start:stop]) for x in (full, bare))
        np.testing.assert_array_equal(bare.readable, full.readable)
        np.testing.assert_array_equal(
            np.broadcast_to(bare.mask().materialize(1, SIZE + 2), (B, 1, 1, SIZE + 2)),
            full.mask().materialize(1, SIZE + 2),
        )
    assert bare.valid is None and bare.positions is None
    joined = [xa.Memory.concat(memory, xa.Memory(KEYS, VALUES)) for memory in (full, bare)]
    np.testing.assert_array_equal(*(memory.readable for memory in joined))
    # The part without positions stands where it lies.
    later = np.broadcast_to(SIZE + 2 + np.arange(SIZE), (B, SIZE))
    np.testing.assert_array_equal(joined[0].positions[:, SIZE + 2 :], later)


@pytest.mark.parametrize(("name", "dtype"), [("valid", bool), ("positions", int)])
def test_a_bare_memory_refuses_what_it_would_lose(name, dtype):
    bare = xa.Memory.empty((B,), SIZE, K, H, HV, bare=True)
    with pytest.raises(ValueError, match=f"keeps no {name}"):
        bare.append(KEYS[:, :1], VALUES[:, :1], **{name: jnp.ones((B, 1), dtype)})


def test_positions_follow_what_is_appended():
    memory = append(filled(2), KEYS[:, 2:5], VALUES[:, 2:5])
    positions = jnp.arange(SIZE) if memory.positions is None else memory.positions
    found = np.broadcast_to(positions, (B, SIZE))[:, :5]
    np.testing.assert_array_equal(found, np.tile(np.arange(5), (B, 1)))


def test_appended_padding_may_not_be_read():
    valid = jnp.array([[True, False, True], [False, True, True]])
    memory = append(filled(2), KEYS[:, 2:5], VALUES[:, 2:5], valid=valid)
    both = jnp.concatenate([jnp.ones((B, 2), bool), valid, jnp.zeros((B, 1), bool)], axis=1)
    assert int(memory.length) == 5
    np.testing.assert_array_equal(may_read(memory), both)
    close(read(memory), attend(QUERIES, KEYS, VALUES, xa.masks.key_padding(both)))


def test_appended_padding_of_nan_reaches_nothing():
    valid = jnp.array([[True, False], [False, True]])
    hole = jnp.where(valid[..., None, None], 0, jnp.nan)
    memory = append(filled(2), KEYS[:, 2:4] + hole, VALUES[:, 2:4] + hole, valid=valid)
    assert np.isfinite(read(memory)).all()


@pytest.mark.parametrize(("filled_slots", "size"), [(0, 4), (1, 6), (6, 6)])
def test_more_than_is_free_is_refused(filled_slots, size):
    words = f"{SIZE} slots do not fit in a memory of size {size}, of which {filled_slots}"
    with pytest.raises(ValueError, match=words):
        filled(filled_slots, size).append(KEYS, VALUES)


def test_traced_writes_past_the_end_are_dropped_and_nothing_is_overwritten():
    found = append(filled(SIZE), KEYS[:, :3], VALUES[:, :3])
    assert int(found.length) == SIZE
    np.testing.assert_array_equal(found.keys, KEYS)
    np.testing.assert_array_equal(found.values, VALUES)
    assert may_read(found).all()


def test_what_still_fits_of_an_append_is_written():
    found = append(filled(4), KEYS[:, :3], VALUES[:, :3])
    expected = jnp.concatenate([KEYS[:, :4], KEYS[:, :2]], axis=1)
    np.testing.assert_array_equal(found.keys, expected)
    np.testing.assert_array_equal(may_read(found), np.ones((B, SIZE), bool))
    assert int(found.length) == SIZE


def test_gradients_pass_through_appends():
    def cached(keys, values):
        memory = empty(SIZE + 1)
        for t in range(0, SIZE, 2):
            memory = memory.append(keys[:, t : t + 2], values[:, t : t + 2])
        return jnp.sum(read(memory) ** 2)

    def direct(keys, values):
        return jnp.sum(attend(QUERIES, keys, values) ** 2)

    found, expected = (jax.jit(jax.grad(f, (0, 1)))(KEYS, VALUES) for f in (cached, direct))
    jax.tree.map(close, found, expected)


def test_memories_read_together_are_one_memory():
    valid = jnp.arange(4) < jnp.array([[1], [4]])
    padded = xa.Memory(keys=KEYS[:, 2:], values=VALUES[:, 2:], valid=valid)
    joined = xa.Memory.concat(xa.Memory(keys=KEYS[:, :2], values=VALUES[:, :2]), padded)
    assert joined.size == SIZE
    both = jnp.concatenate([jnp.ones((B, 2), bool), valid], axis=1)
    np.testing.assert_array_equal(may_read(joined), both)
    close(read(joined), attend(QUERIES, KEYS, VALUES, xa.masks.key_padding(both)))


def test_a_cache_joined_to_a_memory_keeps_its_unwritten_slots_unread():
    joined = xa.Memory.concat(filled(2), xa.Memory(keys=KEYS, values=VALUES), filled(1, size=3))
    expected = [1, 1, 0, 0, 0, 0] + [1] * SIZE + [1, 0, 0]
    np.testing.assert_array_equal(may_read(joined), np.tile(np.array(expected, bool), (B, 1)))


def test_memories_of_different_heads_are_not_joined():
    one = xa.Memory(keys=KEYS, values=VALUES)
    other = xa.Memory(keys=KEYS[:, :, :1], values=VALUES[:, :, :1])
    with pytest.raises(ValueError):
        xa.Memory.concat(one, other)


def test_take_reorders_beams_and_their_readable_slots():
    valid = jnp.array([[True, False, True], [True, True, True]])
    memory = append(filled(2), KEYS[:, 2:5], VALUES[:, 2:5], valid=valid)
    taken = jax.jit(lambda memory, order: memory.take(order))(memory, jnp.array([1, 1, 0]))
    order = np.array([1, 1, 0])
    np.testing.assert_array_equal(taken.keys, memory.keys[order])
    np.testing.assert_array_equal(taken.values, memory.values[order])
    found = np.broadcast_to(taken.mask().materialize(1, SIZE), (3, 1, 1, SIZE))[:, 0, 0]
    np.testing.assert_array_equal(found, may_read(memory)[order])
    assert int(taken.length) == int(memory.length) == 5


def test_a_taken_memory_grows_on():
    taken = filled(2).take(jnp.array([1, 0]))
    grown = taken.append(KEYS[:, 2:3], VALUES[:, 2:3])
    np.testing.assert_array_equal(grown.keys[:, :2], KEYS[::-1, :2])
    np.testing.assert_array_equal(grown.keys[:, 2], KEYS[:, 2])


def test_take_works_without_optional_parts():
    taken = xa.Memory(keys=KEYS, values=VALUES).take(jnp.array([1]))
    np.testing.assert_array_equal(taken.keys, KEYS[1:])
    assert taken.mask().materialize(1, SIZE).all()


def test_a_memory_passes_through_jit_scan_and_vmap_unchanged_in_shape():
    def step(memory, now):
        return memory.append(now[0][:, None], now[1][:, None]), None

    steps = (jnp.moveaxis(KEYS, 1, 0), jnp.moveaxis(VALUES, 1, 0))
    memory, _ = jax.jit(lambda memory: jax.lax.scan(step, memory, steps))(empty())
    np.testing.assert_array_equal(memory.keys, KEYS)
    before, after = jax.tree.structure(empty()), jax.tree.structure(memory)
    assert before == after


def test_a_memory_is_frozen():
    with pytest.raises(AttributeError):
        empty().keys = KEYS


@pytest.mark.usefixtures("in_production")
def test_the_width_of_what_is_appended_must_match():
    with pytest.raises(ValueError, match="keys"):
        empty().append(KEYS[..., :2], VALUES)
    with pytest.raises(ValueError, match="values"):
        empty().append(KEYS, VALUES[:, :2])


def test_nothing_is_taken_from_a_memory_without_examples():
    with pytest.raises(ValueError, match=r"\(4, 2, 3\), no batch axis"):
        xa.Memory(np.zeros((4, 2, 3)), np.zeros((4, 2, 3))).take(jnp.array([0, 1]))


@pytest.mark.usefixtures("in_production")
def test_what_all_examples_share_is_taken_and_joined_for_each():
    keys, valid = np.zeros((3, 4, 2, 3), np.float32), np.array([True, False, True, True])
    shared = xa.Memory(keys, keys, valid=valid, positions=np.array([3, 1, 0, 2]))
    each = xa.Memory(
        keys, keys, valid=np.tile(valid, (3, 1)), positions=np.tile([3, 1, 0, 2], (3, 1))
    )
    for change in (lambda m: m.take(jnp.array([2, 0])), lambda m: xa.Memory.concat(m, each)):
        jax.tree.map(np.testing.assert_array_equal, change(shared), change(each))
