"""CrossViT and ViT: who reads what, and pictures of other sizes.

That CrossViT computes what timm computes is for ``tests/weights/test_crossvit.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.models import CrossViT, ViT, crossvit, vit
from tests import numpy_model as oracle
from tests.compiled import compiled

IMAGE = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 12, 3)), jnp.float32)
MODELS = {
    "crossvit": (CrossViT, crossvit.tiny()),
    "vit": (ViT, vit.tiny(image_size=(8, 12))),
}


def built(name, **changes):
    module, config = MODELS[name]
    config = type(config)(**vars(config) | changes)
    build = lambda rngs: module(config, rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build)


def patches(model):
    """The patches of both branches."""
    both = lambda model, image: (model.small_patches(image), model.large_patches(image))  # noqa: E731
    return compiled(both, model, IMAGE)


def test_a_vit_equals_numpy():
    build, params = built("vit")
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    model = xa.functional.bind(build, params)
    x, found = compiled(lambda model, image: (model.patches(image), model(image)), model, IMAGE)
    x = np.asarray(x, np.float64)
    for index in ("0", "1"):
        x = oracle.block(p["encoder"]["layers"][index], x, act="gelu")
    token = oracle.layer_norm(p["norm"], x)[:, 0]
    expected = token @ p["output"]["linear"]["kernel"] + p["output"]["linear"]["bias"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_class_token_reads_the_other_branch_and_nothing_else_crosses():
    build, params = built("crossvit", stages=1)
    model = xa.functional.bind(build, params)
    small, large = patches(model)
    stage = model.stages[0]
    before, after = stage(small, large), stage(small, large.at[:, 3].add(1))
    changed = [np.any(a != b, axis=(0, 2)) for a, b in zip(before[:2], after[:2], strict=True)]
    assert changed[0][0] and not changed[0][1:].any()  # of the small ones the class token alone
    assert changed[1].all()
    # Its patches read nothing of the other branch, and its class token only through the exchange.
    alone, _ = stage.small(small)
    np.testing.assert_array_equal(before[0][:, 1:], alone[:, 1:])


def test_branches_without_an_exchange_are_two_models():
    build, params = built("crossvit", exchange=False)
    model = xa.functional.bind(build, params)
    small, large = patches(model)
    stage = jax.jit(model.stages[0])
    before = stage(small, large)
    np.testing.assert_array_equal(before[0], stage(small, large + 1)[0])
    np.testing.assert_array_equal(before[1], stage(small + 1, large)[1])
    other = xa.functional.bind(built("crossvit")[0], params)
    exchanging = compiled(lambda model, *xs: model.stages[0](*xs)[0], other, small, large)
    assert not np.allclose(before[0], exchanging)


@pytest.mark.parametrize("name", MODELS)
def test_pictures_of_other_sizes_are_read(name):
    build, params = built(name)
    larger = jnp.concatenate([IMAGE, IMAGE], axis=1)
    found = jax.jit(lambda params, image: xa.apply(build, params, image))(params, larger)
    assert found.shape == (3, 5) and np.isfinite(found).all()


@pytest.mark.parametrize(
    ("name", "grids"),
    [
        ("crossvit", {"large patches": (2, 3), "small patches": (4, 6)}),
        ("vit", {"patches": (2, 3)}),
    ],
)
def test_what_is_read_of_each_patch_is_a_share(name, grids):
    build, params = built(name)
    model = xa.functional.bind(build, params)
    weights = compiled(lambda model, image: model.patch_weights(image), model, IMAGE)
    assert {n: w.shape for n, w in weights.items()} == {n: (3, *g) for n, g in grids.items()}
    for share in weights.values():
        total = np.asarray(share.sum((1, 2)))
        assert (np.asarray(share) > 0).all() and (total < 1).all()  # the rest is the token's own
