"""Pictures and texts together, which no published class reads, held to parts of ``transformers``."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import crossattn as xa
from tests.peers import peer
from tests.weights import checkpoints

INPUTS = "perceiver.input_preprocessor"
NAMES = {
    "tokens.embedding": f"{INPUTS}.modalities.text.embeddings",
    "tokens.learned": f"{INPUTS}.modalities.text.position_embeddings",
    "kinds.0": f"{INPUTS}.padding.image",
    "kinds.1": f"{INPUTS}.padding.text",
}


def reference(settings, image_size, bands):
    """Returns a model made of parts of ``transformers``, with lively parameters."""
    torch, transformers = peer("torch"), peer("transformers")
    theirs = transformers.models.perceiver.modeling_perceiver
    own = {name: x for name, x in settings.items() if name not in ("architectures", "model_type")}
    config = transformers.PerceiverConfig(**own, num_labels=5)
    config._attn_implementation = "eager"
    dim = settings["d_latents"]
    positions = dict(concat_pos=True, max_resolution=image_size, num_bands=bands, sine_only=False)
    kinds = dict(
        image=theirs.PerceiverImagePreprocessor(
            config,
            prep_type="pixels",
            spatial_downsample=1,
            fourier_position_encoding_kwargs=positions,
        ),
        text=theirs.PerceiverTextPreprocessor(config),
    )
    decoder = theirs.PerceiverClassificationDecoder(
        config,
        num_channels=dim,
        trainable_position_encoding_kwargs=dict(num_channels=dim, index_dims=1),
        use_query_residual=True,
    )
    model = theirs.PerceiverModel(
        config,
        decoder=decoder,
        input_preprocessor=theirs.PerceiverMultimodalPreprocessor(kinds, min_padding_size=2),
    ).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return torch, model


def test_pictures_and_texts_together_are_read_as_transformers_reads_them():
    settings = checkpoints.PERCEIVER | dict(
        architectures=["PerceiverForSequenceClassification"], qk_channels=8
    )
    torch, theirs = reference(settings, (4, 5), 3)
    described = xa.weights.describe(settings | dict(id2label=dict.fromkeys("01234", "")))
    config = replace(described.config, image_size=(4, 5), bands=3)
    rules = replace(described.rules, names={**described.rules.names, **NAMES})
    build = lambda rngs: described.module(config, rngs=rngs)  # noqa: E731
    tensors = {f"perceiver.{name}": x.detach().numpy() for name, x in theirs.named_parameters()}
    axes = xa.functional.flatten(xa.functional.logical_axes(build))
    params = {
        path: rules.to_param(path, tensors[rules.tensor_of(path).module], leaf.shape, axes[path])
        for path, leaf in xa.functional.flatten(xa.functional.shapes(build)).items()
    }
    assert len(params) == len(tensors)
    rng = np.random.default_rng(0)
    image = rng.normal(size=(2, 4, 5, 3)).astype(np.float32)
    tokens, present = rng.integers(6, 20, (2, 7)), np.arange(7) < [[7], [4]]
    given = {"image": torch.tensor(image).permute(0, 3, 1, 2), "text": torch.tensor(tokens)}
    mask = torch.tensor(np.concatenate([np.ones((2, 20)), present], 1))
    expected = theirs(given, attention_mask=mask).logits.detach().numpy()
    call = jax.jit(lambda p, *x: xa.apply(build, p, x[0], x[1], segment_ids=x[2]))
    found = call(xa.functional.nest(params), tokens, image, jnp.asarray(present, jnp.int32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
