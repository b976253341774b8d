"""Pictures read by a decoder: against its halves, put together by hand; a ViT against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.functional import bind
from crossattn.models import (
    Decoder,
    VisionEncoderDecoder,
    ViT,
    decoder,
    vision_encoder_decoder,
    vit,
)
from crossattn.nn import Encoded
from tests import numpy_model as oracle
from tests.compiled import compiled
from tests.weights import checkpoints

IMAGES = jax.random.normal(jax.random.key(0), (2, 12, 12, 3))
TOKENS = jnp.array([[1, 5, 9, 7], [1, 8, 5, 3]])


def built(memory_dim):
    config = vision_encoder_decoder.tiny(decoder=decoder.tiny(memory_dim=memory_dim))
    build = lambda rngs: VisionEncoderDecoder(config, rngs=rngs)  # noqa: E731
    return config, build, oracle.random_params(build)


def run(build, params):
    return compiled(lambda *given: xa.apply(build, *given), params, IMAGES, TOKENS)


@pytest.mark.parametrize("memory_dim", [32, 20])
def test_it_is_a_vit_that_a_decoder_reads(memory_dim):
    config, build, params = built(memory_dim)
    reader = lambda rngs: ViT(config.encoder, rngs=rngs)  # noqa: E731
    writer = lambda rngs: Decoder(config.decoder, rngs=rngs)  # noqa: E731

    def by_hand(params, images):
        vectors = bind(reader, params["encoder"]).encode(images).vectors
        if memory_dim != 32:
            vectors = vectors @ params["bridge"]["kernel"] + params["bridge"]["bias"]
        return xa.apply(writer, params["decoder"], TOKENS, memory=Encoded(vectors))

    expected = compiled(by_hand, params, IMAGES)
    np.testing.assert_allclose(run(build, params), expected, rtol=1e-4, atol=1e-4)


def test_a_decoder_that_says_nothing_of_what_it_reads_reads_the_vectors_as_they_are():
    (_, unsaid, params), (_, said, _) = built(None), built(32)
    assert "bridge" not in params
    found, expected = (run(build, params) for build in (unsaid, said))
    np.testing.assert_array_equal(found, expected)


def test_it_returns_what_each_word_reads():
    _, build, params = built(20)
    model = bind(build, params)
    _, weights = jax.jit(lambda x, y: model(x, y, return_weights=True))(IMAGES, TOKENS)
    assert weights.shape == (2, 2, 2, 4, 1 + 9)  # layers, pictures, heads, words, token and patches
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_a_picture_without_a_batch_is_refused():
    _, build, params = built(32)
    with pytest.raises(ValueError, match="source has"):
        compiled(xa.decode.generate, bind(build, params), IMAGES[0], max_new_tokens=2)


@pytest.mark.parametrize("kind", ["vit", "deit"])
def test_a_vit_reads_pictures_of_other_sizes_as_in_transformers(kind, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name = {"vit": "ViTModel", "deit": "DeiTModel"}[kind]
    config = checkpoints.VIT | dict(model_type=kind, image_size=12)
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(**config)).eval()
    with torch.no_grad():
        model.embeddings.position_embeddings.normal_()
        model.save_pretrained(tmp_path)
        pictures = np.random.default_rng(1).normal(size=(2, 9, 18, 3)).astype(np.float32)
        given = torch.from_numpy(pictures).permute(0, 3, 1, 2)
        expected = model(given, interpolate_pos_encoding=True).last_hidden_state
    loaded, params, _ = xa.load(tmp_path)
    found = jax.jit(lambda x: bind(loaded, params).encode(x).vectors)(pictures)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_distilled_vit_has_the_mean_of_both_logits():
    config = vit.tiny(distillation_token=True, distillation_output=True)
    build = lambda rngs: ViT(config, rngs=rngs)  # noqa: E731
    model = bind(build, oracle.random_params(build))

    def both(model, images):
        vectors = model.encode(images).vectors
        own = model.output.logits(vectors[:, 0])
        taught = model.distillation_output.logits(vectors[:, 1])
        return model(images), (own + taught) / 2, model.patch_weights(images)["patches"]

    found, expected, weights = compiled(both, model, IMAGES)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert weights.shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(encoder=checkpoints.VIT | dict(model_type="swin")), "encoder of model_type 'swin'"),
        (dict(decoder=checkpoints.GPT2 | dict(model_type="llama")), "decoder of model_type 'llama'"),
        (dict(decoder=checkpoints.TROCR | dict(use_learned_position_embeddings=False, d_model=9)),
         "d_model 9; expected an even number"),
        (dict(decoder=checkpoints.GPT2), "decoder that reads nothing"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_one_line(change, said):
    with pytest.raises(xa.weights.CheckpointError, match=said):
        xa.weights.describe(checkpoints.CAPTIONER | change)
