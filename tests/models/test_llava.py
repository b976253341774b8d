"""LLaVA: a decoder whose vocabulary has the vectors of its images, by every search; and what is refused.

That it computes what ``transformers`` computes is for ``tests/weights/test_parity.py``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import crossattn as xa
from crossattn.decode import PromptLookup, generate, sampling
from crossattn.models import Decoder, Llava, ViT, decoder, llava, vit
from crossattn.nn import Embedding, image_positions, stack_layers
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled

V, IMAGE = 64, 3
IMAGES = jax.random.normal(jax.random.key(0), (3, 2, 8, 8, 3))
ONE = [IMAGE] * 4
PROMPTS = [[1, *ONE, 9, 11, *ONE, 8], [*ONE, 12], [1, 5, 6]]
COUNTS = [2, 1, 0]
SEARCHES = {
    "greedy": {},
    "drawn": dict(key=jax.random.key(1), processors=[sampling.temperature(0.8)]),
    "beams": dict(num_beams=3),
    "candidates": dict(candidates=3),
    "speculative": dict(draft=PromptLookup(np.tile(np.arange(20, 28), (3, 1)), lookahead=3)),
}


@functools.cache
def model(**changes):
    config = llava.tiny(tie_output=False, layers=1, **changes)
    build = lambda rngs: Llava(config, rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build, seed=3)


def as_words(build, params, positions):
    """A language model that has the images' vectors as words, and the words [3 2 P] that they are."""
    encode = lambda model, images: model.encode(images)  # noqa: E731
    vectors = compiled(encode, xa.functional.bind(build, params), IMAGES)
    own = decoder.tiny(tie_output=False, layers=1, positions=positions)

    def text(rngs):
        made = Decoder(own, rngs=rngs)
        made.input.embedding = Embedding(V + vectors[..., 0].size, own.block.dim, rngs=rngs)
        return made

    named = xa.functional.flatten(xa.functional.shapes(text))
    flat = {name: xa.functional.flatten(params)[name] for name in named}
    table = flat["input.embedding.table"]
    words = vectors.reshape(-1, table.shape[1]) / table.shape[1] ** 0.5  # embeddings are scaled
    flat["input.embedding.table"] = jnp.concatenate([table, words])
    ids = V + np.arange(len(words)).reshape(vectors.shape[:-1])
    return text, xa.functional.nest(flat), ids


def spelt(prompts, places, ids):
    """The same prompts with words for images."""
    rows = [list(row) for row in prompts]
    for row, starts, own in zip(rows, places, ids, strict=True):
        for start, word in zip(starts, own, strict=True):
            if start >= 0:
                row[start : start + len(word)] = word.tolist()
    return rows


@functools.cache
def both(positions="sinusoidal"):
    build, params = model(positions=positions)
    places = xa.functional.bind(build, params).image_positions(PROMPTS, COUNTS)
    np.testing.assert_array_equal(places, [[1, 7], [0, -1], [-1, -1]])
    text, own, ids = as_words(build, params, positions)
    return (build, params, places), (text, own, spelt(PROMPTS, places, ids))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rope"])
def test_images_stand_in_the_text_as_words_do(positions):
    (build, params, places), (text, own, words) = both(positions)
    padded = np.zeros((3, 13), np.int32)
    spelt = padded.copy()
    for row in range(3):
        padded[row, : len(PROMPTS[row])] = PROMPTS[row]
        spelt[row, : len(words[row])] = words[row]
    given = dict(images=IMAGES, image_positions=places)
    found = jax.jit(lambda p: xa.apply(build, p, jnp.asarray(padded), **given))(params)
    expected = jax.jit(lambda p: xa.apply(text, p, jnp.asarray(spelt)))(own)
    close(found, expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("search", SEARCHES)
def test_prompts_with_images_go_on_as_those_with_words_for_them_by_every_search(search):
    """Rows have two images, one and none, and prompts of unlike lengths."""
    (build, params, places), (text, own, words) = both()

    def say(build, params, prompts, **inputs):
        made = xa.functional.bind(build, params)
        return generate(
            made, prefix=prompts, inputs=inputs, max_new_tokens=6, batch=3, **SEARCHES[search]
        )

    given = dict(images=IMAGES, image_positions=places)
    found = jax.jit(lambda p: say(build, p, PROMPTS, **given))(params)
    expected = jax.jit(lambda p: say(text, p, words))(own)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)
    assert len({tuple(row) for row in np.asarray(found.tokens)[:, 0].tolist()}) == 3


@pytest.mark.slow
def test_a_projector_of_one_layer_is_linear_and_a_class_token_may_stay():
    tower = vit.tiny(num_classes=None, image_size=(8, 8), output_norm="none")
    build, params = model(vision=tower, keep_class_token=True, projector_layers=1)
    found = compiled(
        lambda model, images: model.encode(images), xa.functional.bind(build, params), IMAGES
    )
    assert found.shape == (3, 2, 5, 32) and build(nnx.Rngs(0)).image_tokens == 5
    reader = lambda rngs: ViT(tower, rngs=rngs)  # noqa: E731
    tower_alone = xa.functional.bind(reader, params["vision"])
    vectors = compiled(lambda model, images: model.encode(images).vectors, tower_alone, IMAGES)
    own = params["projector"]["first"]
    close(found, vectors @ own["kernel"] + own["bias"])
    for changes, said in (
        (dict(projector_layers=3), "^projector_layers is 3; expected 1 or 2"),
        (dict(vision=vit.tiny(class_token=False)), "^class_token is False, but classes"),
    ):
        with pytest.raises(ValueError, match=said):
            Llava(llava.tiny(**changes), rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_an_image_without_its_tokens_and_tokens_without_an_image_are_refused(in_production):
    made = xa.functional.bind(*model())
    places = np.array([[1], [-1]])
    tokens = np.array([[1, *ONE, 5, 6], [1, 5, 6, 7, 8, 9, 10]])
    for options, said in (
        (dict(), r"^row 0 has 4 image tokens \(id 3\) and 0 images; expected 4 tokens for each image"),
        (dict(images=IMAGES[:2, :1], image_positions=places + [[0], [2]]),
         r"^row 1 has 0 image tokens \(id 3\) and 1 images"),
        (dict(images=IMAGES[:2, :1]), "^got images without image_positions"),
        (dict(images=IMAGES[:2], image_positions=places), r"shape \(2, 1\) and images .* \(2, 2\)"),
        (dict(images=IMAGES[:1, :1], image_positions=places[:1]), "^images has 1 rows; expected"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            made.hidden(tokens, **options)
    with pytest.raises(
        ValueError, match=r"at \[0, 2, 3, 4\]; expected 4 tokens for .* side by side"
    ):
        image_positions([[IMAGE, 5, *ONE[:3]]], IMAGE, size=4)
    with pytest.raises(ValueError, match="has no image_id; set the token"):
        xa.functional.bind(*model(image_id=None)).image_positions(tokens)


def test_what_is_read_of_patches_is_a_share_of_what_stands_before():
    build, params = model()
    made = xa.functional.bind(build, params)
    tokens = jnp.asarray([[*ONE, 12, *ONE, 9], [1, 5, *ONE, 7, 8, 9, 10]])
    places = np.array([[0, 5], [2, -1]], np.int32)
    found = np.asarray(jax.jit(made.patch_weights)(tokens, IMAGES[:2], places))
    assert found.shape == (2, 10, 2, 2, 2) and (found >= 0).all()
    flat = found.reshape(2, 10, 2, 4)
    # Of the first image, which begins the text, there is nothing else to read.
    np.testing.assert_allclose(flat[0, :4, 0].sum(-1), 1, rtol=1e-5)
    for token in range(4):
        assert (flat[0, token, 0] > 0).tolist() == [patch <= token for patch in range(4)]
        assert (flat[0, 5 + token, 1] > 0).tolist() == [patch <= token for patch in range(4)]
    assert (flat[0, :5, 1] == 0).all() and (flat[1, :2] == 0).all() and (flat[1, :, 1] == 0).all()
    assert (flat[0, 9].sum(-1) > 0).all() and flat[0, 9].sum() < 1
    own = params["decoder"]["stack"]["layers"]
    stacked = params | {"decoder": params["decoder"] | {"stack": {"layers": stack_layers(own)}}}
    again = xa.functional.bind(model(scan=True)[0], stacked).patch_weights
    np.testing.assert_allclose(jax.jit(again)(tokens, IMAGES[:2], places), found, atol=1e-5)
