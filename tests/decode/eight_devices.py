"""A program for eight virtual CPU devices: prints what is wrong with each search, "" for nothing."""

import json

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import crossattn as xa
from crossattn.decode import Capture, ModelDraft, generate, sampling, speculative, translate
from crossattn.train.sharding import MeshConfig, make_mesh, params_sharding
from tests.decode.translators import SOURCE, language_model, translator

BATCH = np.concatenate([SOURCE, SOURCE[:, ::-1], SOURCE[:2] // 2 + 3])
LENGTHS = np.array([6, 2, 3, 6, 1, 4, 5, 2])


def drafted(model, source):
    """Speculative decoding, the model its own draft."""
    start = lambda: model.start(source, None, 1, 12)  # noqa: E731
    draft = ModelDraft(model.step, start(), 2)
    return speculative(model.step, start(), draft=draft, batch=len(BATCH), max_length=7)


def text(model, prompts):
    """A decoder-only model goes on with prompts of unlike lengths."""
    return generate(model, batch=len(BATCH), prefix=prompts, prefix_lengths=LENGTHS, max_length=7)


SEARCHES = {
    "greedy": {},
    "contrastive": {"candidates": 3, "prefix": (1, 4)},
    "beams": {"beams": 3, "prefix": (1, 4), "capture": Capture((0,))},
    "sample": {"key": jax.random.key(0), "processors": [sampling.top_k(5), sampling.top_p(0.9)]},
    "speculative": drafted,
    "text": text,
}


def compare(options):
    build, params = language_model() if options is text else translator(decoder_layers=1)
    mesh = make_mesh(MeshConfig(data=4, tensor=2))

    def call(params, source):
        model = xa.functional.bind(build, params)
        if callable(options):
            return options(model, source)
        return translate(model, source, max_length=7, **options)

    axes = xa.functional.logical_axes(build)
    placed = jax.device_put(params, params_sharding(params, axes, mesh))
    rows = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))
    split = {str(x.sharding.spec) for x in jax.tree.leaves(placed)}
    assert any("tensor" in spec for spec in split), split
    found = jax.device_get(jax.jit(call)(placed, rows))
    alone = jax.device_get(jax.jit(call)(params, BATCH))
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-4)


def fault(check, *arguments):
    try:
        check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}" or "failed"
    return ""


def main():
    assert jax.device_count() == 8
    print(json.dumps({name: fault(compare, options) for name, options in SEARCHES.items()}))


if __name__ == "__main__":
    main()
