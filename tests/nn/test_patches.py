"""Patches of pictures: against loops in float64, and PyTorch's interpolation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.nn import PatchEmbedding
from crossattn.nn.patches import resized
from tests import numpy_model as oracle
from tests.compiled import compiled

IMAGE = np.random.default_rng(0).normal(size=(2, 9, 12, 3)).astype(np.float32)


def built(**options):
    build = lambda rngs: PatchEmbedding((9, 12), 4, 3, 5, rngs=rngs, **options)  # noqa: E731
    return build, oracle.random_params(build)


@pytest.mark.parametrize("class_token", [True, False])
def test_a_patch_is_projected_where_it_stands(class_token):
    build, params = built(class_token=class_token)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    rows = [p["class_token"][0][None].repeat(2, 0)] if class_token else []
    for y in (0, 4):
        for x in (0, 4, 8):
            patch = IMAGE[:, y : y + 4, x : x + 4]  # the ninth row stands over
            rows.append(np.einsum("bhwc,chwd->bd", patch, p["projection"]["kernel"]))
            rows[-1] += p["projection"]["bias"]
    expected = np.stack(rows, 1) + p["positions"]["table"]
    found = compiled(lambda *given: xa.apply(build, *given), params, IMAGE)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_positions_are_interpolated_for_other_sizes():
    torch = pytest.importorskip("torch")
    build, params = built()
    params["projection"] = jax.tree.map(jnp.zeros_like, params["projection"])
    table = torch.from_numpy(np.array(params["positions"]["table"]))
    grid = table[1:].reshape(1, 2, 3, 5).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, size=(2, 6), mode="bicubic", align_corners=False)
    expected = np.concatenate([params["class_token"] + table[:1].numpy(), grid[0].flatten(1).T])
    zeros = jnp.zeros((1, 9, 24, 3))
    found = compiled(lambda *given: xa.apply(build, *given)[0], params, zeros)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_patches_need_not_be_square_and_a_second_token_may_stand_before_them():
    build = lambda rngs: PatchEmbedding((9, 12), (3, 5), 3, 5, distillation_token=True, rngs=rngs)  # noqa: E731
    params = oracle.random_params(build)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    cut = IMAGE[:, :, :10].reshape(2, 3, 3, 2, 5, 3)
    expected = np.einsum(
        "bythwc,chwd->bytd", cut.transpose(0, 1, 3, 2, 4, 5), p["projection"]["kernel"]
    )
    expected = expected.reshape(2, 6, 5) + p["projection"]["bias"] + p["positions"]["table"][2:]
    found = compiled(lambda *given: xa.apply(build, *given), params, IMAGE)
    np.testing.assert_allclose(found[:, 2:], expected, rtol=1e-4, atol=1e-5)
    for i, token in enumerate(("class_token", "distillation_token")):
        first = p[token][0] + p["positions"]["table"][i]
        np.testing.assert_allclose(found[:, i], [first, first], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(5, 20), (9, 12), (14, 7)])
def test_pictures_are_scaled_as_by_torch(size):
    torch = pytest.importorskip("torch")
    given = torch.from_numpy(IMAGE).permute(0, 3, 1, 2)
    options = dict(mode="bicubic", align_corners=False)
    expected = torch.nn.functional.interpolate(given, size=size, **options).permute(0, 2, 3, 1)
    np.testing.assert_allclose(resized(jnp.asarray(IMAGE), size), expected, rtol=1e-4, atol=1e-5)


def test_what_has_no_patches_is_refused():
    build, params = built()
    with pytest.raises(ValueError, match="a picture of 12 x 3 pixels has no patch of 4 x 4"):
        xa.apply(build, params, jnp.asarray(IMAGE[:, :3]))
    with pytest.raises(ValueError, match="has 1 channels; expected 3"):
        xa.apply(build, params, jnp.asarray(IMAGE[..., :1]))
