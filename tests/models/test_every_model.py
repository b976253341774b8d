"""Promises of every model: these tests find each file of ``crossattn/models/``.

A model says itself what it is called with, in ``example``; see ``crossattn.models.Architecture``.
"""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import crossattn as xa
from crossattn import models
from crossattn.decode import PromptLookup, generate
from crossattn.testing import models as promised
from crossattn.train.checkpoint import Checkpoints, load_params
from crossattn.train.state import TrainState
from tests.closeness import close
from tests.conftest import on_eight_devices
from tests.models import every_model
from tests.models.every_model import NAMES, build_of, call, example, output, params_of
from tests.peers import package

GENERATING = [name for name in NAMES if every_model.generates(name)]
STEPPING = [name for name in NAMES if hasattr(models.find(name).module, "prefill")]
PADDED = [name for name in NAMES if any(np.shape(x) != np.shape(example(name)[key])
                                        for key, x in example(name, padding=2).items())]  # fmt: skip
every = pytest.mark.parametrize("name", NAMES)


def some(names, *quick):
    """The names, all but some of them for `make test-all`."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


# Of each kind one: states, latents, two inputs, chunks.
KINDS = ("decoder", "perceiver_io", "retro", "transformer", "whisper")
one_of_each_kind = pytest.mark.parametrize("name", some(NAMES, *KINDS))


@every
def test_its_example_has_rows_and_padding(name):
    """The tests below rely on this."""
    assert models.find(name).example is not None, "it lacks example(config, rows, padding)"
    short, padded = example(name, 3), example(name, 3, padding=2)
    assert {len(x) for x in short.values()} == {3} and short.keys() == padded.keys()
    for key, x in short.items():
        np.testing.assert_array_equal(x, cut(padded[key], x.shape), err_msg=key)


@every
def test_it_is_built_without_a_mesh_and_its_parameters_are_a_plain_dict(name):
    init = functools.partial(xa.init, build_of(name))
    params = xa.functional.flatten(jax.eval_shape(init, jax.random.key(0)))
    axes = xa.functional.flatten(xa.functional.logical_axes(build_of(name)))
    assert {path: x.shape for path, x in params.items()} == {
        path: x.shape for path, x in xa.functional.flatten(params_of(name)).items()
    }
    assert all(len(axes[path]) == x.ndim for path, x in params.items())


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", some(NAMES, "bert", "decoder", "transformer_tts", "whisper"))
def test_compiled_it_gives_what_it_gives_step_by_step(name):
    given = jax.tree.map(jnp.asarray, (params_of(name), example(name)))
    close(output(name), call(name, *given), ulps=2000)


@pytest.mark.parametrize(("name", "cached"), [
    *[pytest.param(name, False, marks=[pytest.mark.slow] * (name not in KINDS)) for name in NAMES],
    *[pytest.param(name, True, marks=[pytest.mark.slow] * (name not in ("decoder", "transformer")))
      for name in STEPPING],
])  # fmt: skip
def test_it_keeps_the_promises_of_models(name, cached):
    """Of ``crossattn.testing.models``: no leakage, padding, rows, packed texts; and steps through a cache."""
    promises = [promise for promise in promised.PROMISES if promise.startswith("cached") == cached]
    kept = set()
    for model, visible in every_model.adapters(name):
        asked = [p for p in promises if visible or p != "reads what it may"]
        found = promised.conformance(model, asked)
        assert [finding for finding in found if finding.kind in ("broken", "refused")] == []
        kept |= {(finding.promise, finding.case) for finding in found if finding.kind == "kept"}
    if cached:
        assert ("cached equals whole", "two texts in turn") in kept
        return
    assert {("same again", "after another call"), ("a batch equals its rows", "each row")} <= kept
    assert (("padding", "unequal lengths") in kept) == (name in PADDED)
    assert (("no leakage", "each token") in kept) == (name in STEPPING)


@pytest.mark.quick(1)
@one_of_each_kind
def test_in_bfloat16_it_is_near(name):
    run = jax.jit(functools.partial(call, name, dtype=jnp.bfloat16))
    found, exact = run(params_of(name), example(name)), output(name)
    assert found.dtype == exact.dtype == jnp.float32  # logits and their softmax
    assert 0 < np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact)


@one_of_each_kind
def test_its_parameters_are_saved_and_loaded_bit_by_bit(name, tmp_path):
    params, step = jax.tree.map(jnp.asarray, params_of(name)), jnp.int32(3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, TrainState(step, params, {"step": step}))
    checkpoints.close()
    loaded, _ = load_params(tmp_path, xa.functional.shapes(build_of(name)))
    xa.functional.check(build_of(name), loaded)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@one_of_each_kind
def test_it_is_exported_to_tpus_and_gpus(name, in_production):
    package("flatbuffers", "test")
    run = jax.jit(functools.partial(call, name))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attend runs 'reference'")  # in float32, on those
        exported = export.export(run, platforms=("tpu", "cuda"))(params_of(name), example(name))
    read = export.deserialize(exported.serialize())
    assert read.platforms == ("tpu", "cuda")
    assert read.out_avals[0].shape == output(name).shape


SEARCHES = {
    "greedy": ("", {}),
    "beams": ("select", {"num_beams": 2, "length_penalty": 0.0}),
    "contrastive": ("select", {"candidates": 2}),
    "speculative": ("rewind", {"draft": PromptLookup(np.array([[5, 6, 7], [8, 9, 8]]), 2)}),
}
"""Each search with the method that its states need."""


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", some(GENERATING, "rnn_encoder_decoder", "transformer"))
def test_every_search_that_its_states_allow_scores_a_text_as_it_is_scored_whole(name):
    reads, written = every_model.read_and_written(name)
    build, options = build_of(name), dict(batch=2, max_new_tokens=3, eos_id=())

    @jax.jit
    def searched(params, reads):
        model = xa.functional.bind(build, params)
        able = model.prefill(2, 1, 3, **reads)
        return {
            search: generate(model, inputs=reads, **options, **asked)
            for search, (needed, asked) in SEARCHES.items()
            if not needed or hasattr(able, needed)
        }

    @jax.jit
    def whole(params, reads, tokens):
        begun = jnp.concatenate([jnp.ones((2, 1), tokens.dtype), tokens[:, :-1]], axis=1)
        return jax.nn.log_softmax(xa.apply(build, params, **reads, **{written: begun}))

    found = searched(params_of(name), reads)
    assert "greedy" in found
    for search, best in found.items():
        tokens, log_p = best.tokens[:, 0], whole(params_of(name), reads, best.tokens[:, 0])
        scores = jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0].sum(-1)
        close(best.scores[:, 0], scores, ulps=2000, size=np.abs(log_p).max(), err_msg=search)
        if search in ("greedy", "speculative"):
            np.testing.assert_array_equal(tokens, log_p.argmax(-1), err_msg=search)


# An encoder-decoder and latents; the other models are in `make test-all`, in one process.
QUICK = ("transformer", "perceiver_io")
REST = tuple(name for name in NAMES if name not in QUICK)


@pytest.mark.parametrize("names", [QUICK, pytest.param(REST, marks=pytest.mark.slow)])
def test_every_trained_parameter_gets_a_finite_gradient_which_eight_devices_give_too(names):
    assert set(names) <= set(NAMES)
    found = json.loads(
        on_eight_devices("-m", "tests.models.eight_devices", *names).splitlines()[-1]
    )
    assert found == dict.fromkeys(names, {"gradient": "", "split": ""})


def cut(x, shape):
    """The first part of an array that is of a shape."""
    return x[tuple(map(slice, shape))]
