"""Masks of every kind for two examples, T queries and S keys of four heads."""

import jax.numpy as jnp
import numpy as np

from crossattn import masks as m

T, S = 6, 9
RANDOM = np.random.default_rng(0)
VALID = RANDOM.random((2, S)) < 0.5
SEGMENTS = np.array([[1, 1, 2, 2, 0, 3], [1, 1, 1, 1, 1, 1]])
KEY_SEGMENTS = np.array([[1, 2, 2, 3, 3, 3, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
SHORT, FEW = np.array([0, 4]), np.array([2, 6])
POSITIONS = np.array([[0, 3, 1, 8, 2, 5], [4, 4, 0, 1, 2, 9]])
KEY_POSITIONS = np.array([np.arange(9)[::-1], [0, 0, 1, 1, 2, 2, 3, 3, 4]])

TERMS = {
    "causal": m.causal(),
    "causal_with_offset": m.causal(offset=2),
    "before_every_key": m.causal(offset=-3),
    "offset_of_each_example": m.causal(offset=np.array([-2, 3])),
    "traced_offset": m.window(2, 1, offset=jnp.int32(-2)),
    "window_to_the_left": m.window(2),
    "window_ahead": m.window(2, 1),
    "everything": m.window(None, None),
    "positions": m.window(3, 0, q_positions=POSITIONS),
    "positions_of_keys": m.window(3, 0, offset=2, k_positions=KEY_POSITIONS),
    "positions_of_both": m.causal(q_positions=POSITIONS, k_positions=KEY_POSITIONS),
    "positions_of_all_examples": m.causal(q_positions=POSITIONS[1]),
    "lengths": m.lengths(SHORT, FEW),
    "lengths_of_ints": m.lengths(7, 5),
    "padding": m.key_padding(VALID),
    "segments": m.segments(SEGMENTS, KEY_SEGMENTS),
}
MATRICES = {
    "matrix": m.explicit(RANDOM.random((2, 4, T, S)) < 0.3),
    "matrix_of_one_key": m.explicit(RANDOM.random((2, 1, T, 1)) < 0.5),
    "matrix_of_one_row": m.explicit(VALID[:, None, None]) & m.causal(),
}
MASKS = TERMS | MATRICES | {
    "nothing": m.Mask(()),
    "two_windows": m.window(3) & m.window(1),
    "lengths_twice": m.lengths(SHORT) & m.prefix(3) & m.lengths(8, 5),
    "lengths_and_causal": m.lengths(SHORT) & m.causal(),
    "lengths_and_window": m.lengths(SHORT) & m.window(1),
    "padding_and_causal": m.key_padding(VALID) & m.causal(),
    "causal_segments": TERMS["segments"] & m.causal(),
    "two_segmentations": TERMS["segments"]
    & m.segments(SEGMENTS[:, ::-1], np.ones((2, S), int)),
    "either": m.causal() | m.prefix(SHORT),
    "either_and_lengths": (m.causal() | m.key_padding(VALID)) & m.lengths(8),
    "either_and_segments": (m.causal() | m.prefix(SHORT)) & TERMS["segments"],
    "not": ~m.key_padding(VALID),
}  # fmt: skip


def whole(mask):
    """Bool [2 4 T S]."""
    return np.broadcast_to(mask.materialize(T, S), (2, 4, T, S))
