"""A program for eight virtual CPU devices: prints what is wrong with each search, "" for nothing."""

import json

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import crossattn as xa
from crossattn.decode import Capture, ModelDraft, generate, sampling, speculative
from crossattn.train.sharding import MeshConfig, make_mesh, params_sharding
from tests.decode.translators import SOURCE, language_model, translator

BATCH = np.concatenate([SOURCE, SOURCE[:, ::-1], SOURCE[:2] // 2 + 3])
LENGTHS = np.array([6, 2, 3, 6, 1, 4, 5, 2])


def drafted(model, source):
    """Speculative decoding, the model its own draft."""
    start = lambda: model.prefill(len(source), 1, 12, source=source)  # noqa: E731
    draft = ModelDraft(model.decode_step, start(), 2)
    return speculative(model.decode_step, start(), draft=draft, batch=len(BATCH), max_new_tokens=7)


def text(model, prompts):
    """A decoder-only model goes on with prompts of unlike lengths."""
    return generate(
        model, batch=len(BATCH), prefix=prompts, prefix_lengths=LENGTHS, max_new_tokens=7
    )


SEARCHES = {
    "greedy": {},
    "contrastive": {"candidates": 3, "prefix": (1, 4)},
    "beams": {"num_beams": 3, "prefix": (1, 4), "capture": Capture((0,))},
    "sample": {"key": jax.random.key(0), "processors": [sampling.top_k(5), sampling.top_p(0.9)]},
    "speculative": drafted,
    "text": text,
}


def explicit(mesh):
    """The same mesh, its axes Explicit, as jax.make_mesh makes them."""
    kinds = (AxisType.Explicit,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def compare(options, kind=lambda mesh: mesh):
    build, params = language_model() if options is text else translator(decoder_layers=1)

    def call(params, source):
        model = xa.functional.bind(build, params)
        if callable(options):
            return options(model, source)
        return generate(model, source, max_new_tokens=7, **options)

    return compare_placed(build, params, call, kind(make_mesh(MeshConfig(data=4, tensor=2))))


def training():
    """Logits of every sort of layer, and gradients, all parameters split, on Explicit axes."""
    build, params = translator(scan=True, remat=True, positions="relative")

    def loss(params, source):
        hidden = xa.functional.apply(
            build, params, source, source[:, :4], source_segment_ids=source // 8
        )
        return jax.numpy.sin(hidden).sum()

    mesh = explicit(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    compare_placed(build, params, jax.value_and_grad(loss), mesh)


def compare_placed(build, params, call, mesh):
    axes = xa.functional.logical_axes(build)
    placed = jax.device_put(params, params_sharding(params, axes, mesh))
    rows = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
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
    found = {name: fault(compare, options) for name, options in SEARCHES.items()}
    for name in ("beams", "text"):
        found[f"{name} on explicit axes"] = fault(compare, SEARCHES[name], explicit)
    found["gradients on explicit axes"] = fault(training)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
