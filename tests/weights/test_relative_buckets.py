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
WHOLE += [(32, 128), (128, 100), (32, 800), (100, 128), (64, 81), (32, 17), (16, 9), (4, 3)]
RANDOM = np.random.default_rng(0)
DRAWN = [(int(b), int(RANDOM.integers(b // 2 + 1, 1000))) for b in RANDOM.integers(4, 129, 10)]


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
        # PyTorch's logarithm rounds otherwise on other processors, so that a boundary on a whole distance may
        # be on either side of it there.
        even = on_a_boundary(distances, *setting, bidirectional)
        np.testing.assert_array_equal(found[~even], theirs[~even], err_msg=str(setting))
        assert np.all(np.abs(found[even] - theirs[even]) <= 1), setting


def on_a_boundary(distances, buckets, longest, bidirectional):
    """Distances whose exact bucket is a whole number, or nearly."""
    own = buckets // 2 if bidirectional else buckets
    exact = own // 2
    with np.errstate(divide="ignore", invalid="ignore"):
        bucket = np.log(np.abs(distances) / exact) / np.log(longest / exact) * (own - exact)
        return np.abs(bucket - np.round(bucket)) < 1e-5
