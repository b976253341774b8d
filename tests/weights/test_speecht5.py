"""SpeechT5 against ``transformers``: stops and what it says; live where that is there."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import crossattn as xa
from crossattn.decode import Capture, UntilStop, generate_frames
from crossattn.functional import bind
from experiments.parity.weights import weight
from tests.weights.golden import make_speecht5
from tests.weights.golden.make_speecht5 import FILE, STEPS, inputs
from tests.weights.test_round_trip import same_files


def written(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def kept():
    with np.load(FILE, allow_pickle=False) as file:
        shapes, config = json.loads(str(file["shapes"])), json.loads(str(file["config"]))
        found = {name: file[name] for name in file.files if name not in ("config", "shapes")}
    return config, {name: weight(name, tuple(shape)) for name, shape in shapes.items()}, found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    config, tensors, found = kept()
    model, params, _ = xa.load(written(tmp_path_factory.mktemp("t5") / "theirs", config, tensors))
    return model, params, found


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_frames_have_the_stops_of_transformers(loaded):
    model, params, expected = loaded
    given = {name: jnp.asarray(x) for name, x in inputs().items()}
    # Theirs reads a frame a step, ours the last frame of a group.
    groups = jnp.pad(given["frames"], [(0, 0), (0, 0), (6, 0)])

    @jax.jit
    def run(params):
        own = bind(model, params)
        read = dict(source_segment_ids=given["present"], speaker=given["speaker"])
        return own.stops(own.hidden(given["source"], groups, **read)[0])

    near(run(params), expected["stops"])


def test_it_says_what_transformers_says(loaded):
    model, params, expected = loaded
    given = {name: jnp.asarray(x)[:1] for name, x in inputs().items()}
    search = UntilStop(STEPS, threshold=1 - 1e-7, capture=Capture())

    @jax.jit
    def run(params):
        more = {"speaker": given["speaker"]}
        own = bind(model, params)
        return generate_frames(own, given["source"], search=search, inputs=more)

    found = run(params)
    near(found.groups.reshape(-1, 6), expected["said"])
    near(jnp.moveaxis(found.weights[0], 0, 2), expected["seen"])


def test_a_group_stops_by_the_sum_of_its_frames(loaded):
    model, params, _ = loaded
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 16)), jnp.float32)
    own = bind(model, params)
    each = np.float64(1 / (1 + np.exp(-np.float64(own.stops(hidden))))).sum(-1)
    found = 1 / (1 + np.exp(-np.float64(own.logits(hidden)[1])))
    np.testing.assert_allclose(found, np.minimum(each, 1 - 1e-6), rtol=1e-4)


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "transformers")),
    reason="torch and transformers are not installed",
)
def test_transformers_computes_what_is_kept():
    for name, x in make_speecht5.measure()[2].items():
        near(x, kept()[2][name])


def test_a_checkpoint_is_saved_as_it_was(tmp_path):
    config, tensors, _ = kept()
    same_files(written(tmp_path / "theirs", config, tensors), tmp_path)
    name = "speech_decoder_postnet.layers.1.conv.weight"
    again = load_file(tmp_path / "again" / "model.safetensors")
    np.testing.assert_array_equal(again[name], tensors[name])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(architectures=["SpeechT5ForSpeechToText"]), "the model that speaks is read"),
        (dict(speech_decoder_prenet_layers=3), "speech_decoder_prenet_layers 3"),
    ],
)
def test_what_is_not_done_is_one_line(change, said, tmp_path):
    config, tensors, _ = kept()
    with pytest.raises(xa.weights.CheckpointError, match=said):
        xa.load(written(tmp_path / "theirs", config | change, tensors))


def test_the_published_architecture_has_its_size():
    model = xa.weights.describe(dict(model_type="speecht5", vocab_size=81))
    shapes = xa.functional.flatten(xa.functional.shapes(model))
    assert shapes["relative_keys"].shape == (320, 64)
    assert len(model.config.block.attention.__dict__) and model.config.encoder_layers == 12
