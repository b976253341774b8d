"""A program that lowers training and generation of named models for accelerators, without their compilers.

It prints what is wrong with each, "" for nothing: lowering fails, or attention is not fused, or says why not.
"""

import functools
import json
import sys
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import crossattn as xa
from crossattn.decode import generate
from crossattn.ops import backends
from crossattn.train.sharding import MeshConfig, batch_sharding, make_mesh, params_sharding
from tests.models import every_model
from tests.ops.pretended_gpu import pretended_gpu

PLATFORMS = {"cuda": "cudnn$fmha", "tpu": "tpu_custom_call"}
"""The call target of the fused kernel on each platform."""


def train(name, dtype, ids, padding, mesh):
    """The gradient of a loss, and shapes of what it is called with."""

    def loss(params, given):
        logits = every_model.call(name, params, given, dtype)
        return jnp.sin(logits.astype(jnp.float32)).sum()

    given = every_model.example(name, 8, padding)
    if not ids:
        given = {key: x for key, x in given.items() if not key.endswith("segment_ids")}
    return jax.value_and_grad(loss), placed(name, given, mesh)


def generation(name, dtype, padding, mesh):
    """Greedy generation, likewise."""
    reads = every_model.read_and_written(name, 8, padding)[0]
    build = every_model.build_of(name, dtype)

    def run(params, reads):
        model = xa.functional.bind(build, params)
        return generate(model, inputs=reads, batch=8, max_new_tokens=3, eos_id=()).tokens

    return run, placed(name, reads, mesh)


def placed(name, given, mesh):
    """Shapes of the parameters and of a batch, on one device or on a mesh."""
    build = every_model.build_of(name)
    params, only = xa.functional.shapes(build), SingleDeviceSharding(jax.devices()[0])
    if mesh is None:
        shape = functools.partial(jax.ShapeDtypeStruct, sharding=only)
        return jax.tree.map(lambda x: shape(x.shape, x.dtype), (params, given))
    places = params_sharding(params, xa.functional.logical_axes(build), mesh)
    batch = {key: batch_sharding(x.shape, mesh) for key, x in given.items()}
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (params, given),
        (places, batch),
    )


def fault(function, shapes, fused=tuple(PLATFORMS)):
    """Returns the faults of a function's programs for accelerators."""
    backends._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as said, pretended_gpu():
        warnings.simplefilter("always")
        try:
            traced = jax.jit(function).trace(*shapes)
            text = traced.lower(lowering_platforms=tuple(PLATFORMS)).as_text()
        except Exception as error:
            return f"{type(error).__name__}: {error}" or "failed"
    plain = [f"{w.message}" for w in said if f"{w.message}".startswith("attend ")]
    missing = [platform for platform in fused if PLATFORMS[platform] not in text]
    return "; ".join(plain + [f"nothing is fused for {platform}" for platform in missing])


def faults(names):
    eight = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    for number, name in enumerate(every_model.NAMES):
        if name not in names:
            continue
        narrow = jnp.float16 if number % 3 == 0 else jnp.bfloat16
        odd = number % 2
        fused = tuple(PLATFORMS) if every_model.attends(name) else ()
        yield f"{name}, {narrow.dtype}", fault(*train(name, narrow, True, odd, None), fused)
        plain = train(name, jnp.bfloat16, False, 1 - odd, eight)
        yield f"{name}, without padding, on eight devices", fault(*plain, fused)
        if every_model.generates(name):
            yield f"{name}, generating", fault(*generation(name, jnp.bfloat16, odd, None), ())


if __name__ == "__main__":
    assert jax.device_count() == 8
    print(json.dumps(dict(faults(sys.argv[1:]))))
