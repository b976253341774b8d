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
    """Returns which keys one query may read: Bool [B S]."""
    mask = jax.jit(lambda memory: memory.mask().materialize(1, memory.size))(memory)
    return np.broadcast_to(mask, (B, 1, 1, memory.size))[:, 0, 0]


def read(memory, queries=QUERIES):
    return attend(queries, memory.keys, memory.values, memory.mask())


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


def test_only_what_was_appended_may_be_read():
    memory = append(filled(2), KEYS[:, 2:3], VALUES[:, 2:3])
    np.testing.assert_array_equal(may_read(memory), np.tile(np.arange(SIZE) < 3, (B, 1)))
    close(read(memory), attend(QUERIES, KEYS[:, :3], VALUES[:, :3]))


def test_decoding_step_by_step_in_a_scan_is_the_causal_whole():
    def step(memory, now):
        query, key, value = (x[:, None] for x in now)
        causal = xa.masks.causal(offset=memory.length, k_positions=memory.positions)
        memory = memory.append(key, value)
        out = attend(query, memory.keys, memory.values, memory.mask() & causal)
        return memory, out[:, 0]

    steps = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (QUERIES, KEYS, VALUES))
    memory, found = jax.jit(lambda memory: jax.lax.scan(step, memory, steps))(empty())
    close(jnp.moveaxis(found, 0, 1), WHOLE)
    assert int(memory.length) == SIZE and int(empty().length) == 0
    np.testing.assert_array_equal(memory.keys, KEYS)
    np.testing.assert_array_equal(memory.positions, np.tile(np.arange(SIZE), (B, 1)))


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


def test_appended_padding_may_not_be_read():
    valid = jnp.array([[True, False, True], [False, True, True]])
    memory = append(filled(2), KEYS[:, 2:5], VALUES[:, 2:5], valid=valid)
    both = jnp.concatenate([jnp.ones((B, 2), bool), valid, jnp.zeros((B, 1), bool)], axis=1)
    assert int(memory.length) == 5
    np.testing.assert_array_equal(may_read(memory), both)
    close(read(memory), attend(QUERIES, KEYS, VALUES, xa.masks.key_padding(both)))


@pytest.mark.parametrize("before", [4, SIZE])
def test_traced_writes_past_the_end_are_dropped_and_nothing_is_overwritten(before):
    found = append(filled(before), KEYS[:, :3], VALUES[:, :3])
    assert int(found.length) == SIZE
    expected = jnp.concatenate([KEYS[:, :before], KEYS[:, : SIZE - before]], axis=1)
    np.testing.assert_array_equal(found.keys, expected)
    assert may_read(found).all()


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


def test_memories_joined_are_one_memory_without_their_unwritten_slots():
    valid = jnp.arange(4) < jnp.array([[1], [4]])
    padded = xa.Memory(keys=KEYS[:, 2:], values=VALUES[:, 2:], valid=valid)
    joined = xa.Memory.concat(filled(2, size=3), padded)
    assert joined.size == SIZE + 1
    both = np.concatenate([np.tile([True, True, False], (B, 1)), valid], axis=1)
    np.testing.assert_array_equal(may_read(joined), both)
    whole = xa.masks.key_padding(np.delete(both, 2, axis=1))
    close(read(joined), attend(QUERIES, KEYS, VALUES, whole))


@pytest.mark.usefixtures("in_production")
def test_what_all_examples_share_is_joined_for_each():
    keys, valid = np.zeros((3, 4, 2, 3), np.float32), np.array([True, False, True, True])
    shared = xa.Memory(keys, keys, valid=valid, positions=np.array([3, 1, 0, 2]))
    each = xa.Memory(
        keys, keys, valid=np.tile(valid, (3, 1)), positions=np.tile([3, 1, 0, 2], (3, 1))
    )
    joined = (xa.Memory.concat(memory, each) for memory in (shared, each))
    jax.tree.map(np.testing.assert_array_equal, *joined)


BARE = xa.Memory.empty((B,), SIZE, K, H, HV, bare=True)
NEW = KEYS[:, :1], VALUES[:, :1]


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: filled(0, 4).append(KEYS, VALUES), "6 slots .* size 4, of which 0"),
        (lambda: filled(1).append(KEYS, VALUES), "6 slots .* size 6, of which 1"),
        (lambda: empty().append(KEYS[..., :2], VALUES), "append: keys have shape"),
        (lambda: empty().append(KEYS, VALUES[:, :2]), "keys have length 6 and values 2"),
        (lambda: BARE.append(*NEW, valid=jnp.ones((B, 1), bool)), "keeps no valid"),
        (lambda: BARE.append(*NEW, positions=jnp.ones((B, 1), int)), "keeps no positions"),
        (lambda: xa.Memory(*NEW).append(*NEW), "Memory.append"),
        (lambda: xa.Memory.concat(empty(), xa.Memory(KEYS[:, :, :1], VALUES)), "concat: keys"),
    ],
)
def test_what_does_not_fit_a_memory_is_refused_by_name(call, said):
    with pytest.raises(ValueError, match=said):
        call()
