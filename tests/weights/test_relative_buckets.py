"""Relative buckets beside those of ``transformers`` itself, where PyTorch is installed."""

import jax
import numpy as np
import pytest

import crossattn as xa
from tests.peers import peer

# Many settings whose boundaries fall on whole distances, where rounding decides; then drawn ones.
WHOLE = [
    (17, 27),
    (19, 25),
    (19, 196),
    (34, 27),
    (36, 50),
    (48, 81),
    (51, 169),
    (54, 125),
    (110, 75),
]
WHOLE += [(32, 128), (128, 100), (32, 800), (100, 128), (64, 81), (32, 6), (32, 16), (16, 4)]
RANDOM = np.random.default_rng(0)
DRAWN = [(int(RANDOM.integers(4, 129)), int(RANDOM.integers(1, 1000))) for _ in range(10)]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_are_those_of_transformers(bidirectional):
    torch = peer("torch")
    t5 = peer("transformers.models.t5.modeling_t5")
    distances = np.arange(-1100, 1101)

    @jax.jit
    def every(zero):
        find = xa.bias.relative_buckets
        return [find(zero, distances, *setting, bidirectional)[0] for setting in WHOLE + DRAWN]

    for setting, found in zip(WHOLE + DRAWN, every(np.zeros(1, int)), strict=True):
        theirs = t5.T5Attention._relative_position_bucket(
            torch.from_numpy(distances), bidirectional, *setting
        ).numpy()
        # What is no row of the table ends there in an error.
        expected = np.where((theirs < 0) | (theirs >= setting[0]), setting[0], theirs)
        np.testing.assert_array_equal(found, expected, err_msg=str(setting))
