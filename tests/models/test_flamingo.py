"""Flamingo: what ``transformers`` computes, which text reads which image, and what gates of 0 leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode import generate
from crossattn.models import Decoder, Flamingo, flamingo
from crossattn.nn import image_positions
from tests import numpy_model as oracle
from tests.closeness import close
from tests.compiled import compiled
from tests.models import idefics

RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(4, 64, (3, 8)))
IMAGES = RNG.normal(size=(3, 2, 8, 8, 3)).astype(np.float32)
POSITIONS = np.array([[0, 3], [2, 3], [1, -1]], np.int32)


def model(**changes):
    config = flamingo.tiny(**changes)
    build = lambda rngs: Flamingo(config, rngs=rngs)  # noqa: E731
    return build, oracle.random_params(build)


def logits_of_idefics(name, tensors):
    config = idefics.config(**idefics.CASES[name])
    build = lambda rngs: Flamingo(config, rngs=rngs)  # noqa: E731
    params = idefics.params(tensors, config.interval)
    tokens = jnp.asarray(idefics.TOKENS)
    options = dict(images=idefics.PATCHES, image_positions=idefics.POSITIONS)
    return jax.jit(lambda p: xa.apply(build, p, tokens, **options))(params)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", idefics.CASES)
def test_its_logits_are_those_of_idefics(name):
    tensors, expected = idefics.golden(name)
    assert np.abs(logits_of_idefics(name, tensors) - expected).max() < 1e-4
    assert np.std(expected) > 0.3


def test_its_logits_are_those_of_an_idefics_that_runs_here():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    tensors, expected = idefics.measured(interval=2)
    found = logits_of_idefics("every second block", tensors)
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_every_interleaving_is_read_as_the_rule_says(seed):
    rng = np.random.default_rng(seed)
    places = np.sort(rng.integers(-1, 9, (40, 4)), axis=-1).astype(np.int32)
    places[0], places[1] = -1, 5  # no image; all at one place
    build, params = model()
    made = xa.functional.bind(build, params)
    found = compiled(made.seen, jnp.arange(9), places)["images"]
    expected = np.repeat(idefics.seen(places, 9), 3, axis=-1)
    np.testing.assert_array_equal(found[:, 0], expected)


def test_with_gates_of_0_it_is_its_language_model_bit_for_bit():
    build, params = model(interval=2, layers=4)
    layers = params["decoder"]["stack"]["layers"]
    for i in ("0", "2"):
        for name in ("gated", "gated_feedforward"):
            layers[i][f"{name}_residual"]["gate"] = np.zeros((), np.float32)
    config = flamingo.tiny(layers=4)
    text = lambda rngs: Decoder(config, rngs=rngs)  # noqa: E731
    own = xa.functional.flatten(params)
    own = {name: own[name] for name in xa.functional.flatten(xa.functional.shapes(text))}
    options = dict(images=IMAGES, image_positions=POSITIONS)
    found = jax.jit(lambda p: xa.apply(build, p, TOKENS, **options))(params)
    expected = jax.jit(lambda p: xa.apply(text, p, TOKENS))(xa.functional.nest(own))
    np.testing.assert_array_equal(found, expected)


def test_text_that_reads_no_image_and_a_call_without_images_agree():
    build, params = model()
    nowhere = np.full((3, 2), -1, np.int32)
    with_none = jax.jit(lambda p: xa.apply(build, p, TOKENS))(params)
    found = jax.jit(lambda p: xa.apply(build, p, TOKENS, images=IMAGES, image_positions=nowhere))(
        params
    )
    close(found, with_none)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_rows_say_with_prompts_of_unlike_lengths_what_they_say_alone(scan):
    build, params = model(scan=scan)
    prompts = [[1, 3, 9, 11, 3, 8], [1, 12, 3, 3], [1, 3, 5]]

    def say(rows, params):
        made = xa.functional.bind(build, params)
        inputs = dict(images=IMAGES[rows], image_positions=places[rows])
        return generate(
            made, inputs=inputs, prefix=[prompts[row] for row in rows], max_new_tokens=6
        )

    padded = np.zeros((3, 6), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    places = image_positions(padded, 3)
    together = jax.jit(lambda p: say([0, 1, 2], p))(params)
    alone = jax.jit(lambda p: say([1], p))(params)
    np.testing.assert_array_equal(together.tokens[1], alone.tokens[0])


def test_images_and_their_tokens_come_together_or_are_refused_in_a_sentence(in_production):
    tokens = np.array([[1, 3, 5, 3], [1, 5, 6, 3]])
    np.testing.assert_array_equal(image_positions(tokens, 3), [[1, 3], [3, -1]])
    np.testing.assert_array_equal(image_positions(tokens, 3, [2, 1]), [[1, 3], [3, -1]])
    for counts, said in (
        ([2, 0], r"^row 1 has 1 image tokens \(id 3\) and 0 images; expected one token for each"),
        ([3, 1], r"^row 0 has 2 image tokens \(id 3\) and 3 images; expected one token for each"),
    ):
        with pytest.raises(ValueError, match=said):
            image_positions(tokens, 3, counts)
    made = xa.functional.bind(*model())
    for options, said in (
        (dict(images=IMAGES), r"^got images without image_positions; expected both"),
        (dict(image_positions=POSITIONS), r"^got image_positions without images; expected both"),
        (dict(images=IMAGES, image_positions=POSITIONS[:, :1]), r"\(3, 1\) and images .* \(3, 2\)"),
        (dict(images=IMAGES[:2], image_positions=POSITIONS[:2]), r"^images has 2 rows; expected"),
        (dict(images=IMAGES[..., :1], image_positions=POSITIONS), "has 1 channels; expected 3"),
    ):
        with pytest.raises(ValueError, match=said):
            made.hidden(TOKENS, **options)
    with pytest.raises(ValueError, match=r"^layers is 2; expected a multiple of the period, 3"):
        model(interval=3)


def test_what_words_read_of_patches_goes_by_way_of_latents():
    build, params = model(resampler_layers=2, interval=2)
    made = xa.functional.bind(build, params)
    read = jax.jit(made.patch_weights)
    found = np.asarray(read(TOKENS, IMAGES, POSITIONS))
    assert found.shape == (3, 8, 2, 2, 2) and (found >= 0).all()
    reads = (POSITIONS[:, None] <= np.arange(8)[:, None]) & (POSITIONS[:, None] >= 0)
    reads[:2, 3:, 0] = False  # the second image stands before these
    total = found.sum((-1, -2))
    assert (total[~reads] == 0).all() and (total[reads] > 0).all() and (total < 1).all()
    # Two images in the other order are read as before, each at its place.
    turned = read(TOKENS, IMAGES[:, ::-1], POSITIONS[:, ::-1])
    close(np.asarray(turned)[:, :, ::-1], found)


def test_latents_read_patches_also_by_way_of_latents():
    build, params = model(resampler_layers=2)
    patches = jnp.asarray(RNG.normal(size=(2, 5, 16)), jnp.float32)
    own = xa.functional.bind(build, params).resampler
    order = RNG.permutation(5)
    read = jax.jit(own.patch_weights)
    close(read(patches[:, order]), read(patches)[..., order])
    even = jax.tree_util.tree_map_with_path(
        lambda path, x: 0 * x if "query" in jax.tree_util.keystr(path) else x, params
    )
    found = compiled(xa.functional.bind(build, even).resampler.patch_weights, patches)
    # 5 patches and 3 latents are read evenly; what latents read in the first layer counts once more.
    close(found, np.full((2, 3, 5), 1 / 8 + 3 / 8 * 1 / 8))
