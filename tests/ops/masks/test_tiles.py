"""Masks as kernels for TPUs take them: bands, numbers, first and last keys, matrices, blocks."""

import jax.numpy as jnp
import numpy as np
import pytest

from crossattn.ops.masks import tiles
from tests.ops.masks.table import MASKS, S, T, whole

QUERY, KEY = np.arange(T)[:, None], np.arange(S)[None, :]


@pytest.mark.parametrize("name", MASKS)
def test_the_band_the_numbers_and_the_rest_are_the_mask(name):
    (left, right), ids, rest = tiles.tiled(MASKS[name], T, S)
    allowed = whole(rest)
    allowed = allowed & (True if left is None else KEY - QUERY >= -left)
    allowed &= True if right is None else KEY - QUERY <= right
    if ids.q is not None and ids.k is not None:
        q, k = (np.broadcast_to(x, (2, x.shape[-1])) for x in (ids.q, ids.k))
        allowed &= (q[:, :, None] == k[:, None, :])[:, None]
    np.testing.assert_array_equal(allowed, whole(MASKS[name]))


@pytest.mark.parametrize("name", ["matrix_of_one_row", "lengths_twice", "window_ahead", "segments"])
def test_numbers_and_bands_leave_no_rest(name):
    assert not tiles.tiled(MASKS[name], T, S).rest.terms


@pytest.mark.parametrize("name", MASKS)
def test_first_and_last_keys_or_the_matrix_are_the_mask(name):
    """Padding reads nothing and is not read."""
    padded = T + 2, S + 3
    seen = tiles.seen(MASKS[name], T, S, padded, (2,))
    if seen.allowed is None:
        allowed = seen.reads(seen.numbers[:, None, :, None], jnp.arange(padded[1]))
    else:
        allowed = seen.allowed
    expected = np.pad(whole(MASKS[name]), [(0, 0), (0, 0), (0, 2), (0, 3)])
    np.testing.assert_array_equal(np.broadcast_to(allowed, expected.shape), expected)
    blocks = expected.reshape(2, 4, 4, 2, 4, 3).any((0, 1, 3, 5))
    found = np.asarray(tiles.visited(seen, 2, 3, padded[1]))
    assert found[blocks].all(), "a block that is read is left out"
    if seen.allowed is not None or name in ("traced_offset", "before_every_key", "either"):
        np.testing.assert_array_equal(found, blocks)


@pytest.mark.parametrize(
    "name", ["either", "traced_offset", "offset_of_each_example", "positions", "before_every_key"]
)
def test_prefixes_offsets_and_positions_of_queries_need_no_matrix(name):
    assert tiles.seen(MASKS[name], T, S, (T, S), (2,)).allowed is None
