"""Set-up for tests of every model: its tiny config, its example, random parameters.

Models are found as ``crossattn.models.find`` finds them, and each says itself what it is called with.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
from flax import nnx

import crossattn as xa
from crossattn import models
from crossattn.testing import architectures
from tests import numpy_model as oracle

NAMES = models.known()
RECURRENT = {"attention_sum_reader", "rnn_encoder_decoder"}  # models without blocks


@functools.cache
def build_of(name, dtype=None):
    """Makes the tiny model; the same function each time, whose abstract module is made once."""
    found = models.find(name)
    config = found.tiny()
    config = config if dtype is None else computed_in(config, dtype)
    return lambda rngs: found.module(config, rngs=rngs)


@functools.cache
def params_of(name):
    return oracle.random_params(build_of(name))


def example(name, rows=2, padding=0):
    found = models.find(name)
    return found.example(found.tiny(), rows, padding)


def call(name, params, inputs, dtype=None):
    """The model's output in one array: groups of frames beside the logit that each is the last."""
    found = xa.apply(build_of(name, dtype), params, **inputs)
    if not isinstance(found, tuple):
        return found
    groups, stop = found
    return jnp.concatenate([groups, stop[..., None]], axis=-1)


def adapters(name):
    """Yields the model and whether all that it reads can be seen; and one that refines, before it does.

    What a later frame adds to one that is refined is faint, and no promise.
    """
    given = dict(build=build_of(name), params=params_of(name))
    refines = hasattr(models.find(name).module, "refine")
    for method in ("__call__", *["hidden"] * refines):
        visible = method == "hidden" or not refines
        yield architectures.adapter(models.find(name), method, **given), visible


def loss(name, params, inputs):
    """A number that every output moves."""
    return jnp.sin(call(name, params, inputs)).sum()


@functools.cache
def output(name):
    """Computes the model's output for its example."""
    return jax.device_get(jax.jit(functools.partial(call, name))(params_of(name), example(name)))


def computed_in(config, dtype):
    """The same shape, which computes in another dtype, in its blocks wherever in it they are."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return config
    if hasattr(config, "dtype"):
        return dataclasses.replace(config, dtype=dtype)
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    changed = {key: computed_in(value, dtype) for key, value in values.items()}
    return dataclasses.replace(config, **{k: x for k, x in changed.items() if x is not values[k]})


def attends(name):
    """Whether a model's attention is ``attend``, which has fused kernels."""
    model = nnx.eval_shape(lambda: build_of(name)(nnx.Rngs(0)))
    return any(isinstance(x, xa.nn.MultiHeadAttention) for _, x in nnx.iter_modules(model))


def generates(name):
    """Whether a model generates tokens; one that generates frames has a test of its own."""
    module = models.find(name).module
    return hasattr(module, "prefill") and not hasattr(module, "refine")


def read_and_written(name, rows=2, padding=0):
    """Returns the example's arguments of ``prefill``, and the name of the generated argument."""
    given = example(name, rows, padding)
    takes = inspect.signature(models.find(name).module.prefill).parameters
    reads = {key: x for key, x in given.items() if key in takes}
    (written,) = (k for k in given if k not in takes and not k.endswith("segment_ids"))
    return reads, written
