"""CrossViT against timm: logits, what class tokens read, and checkpoints; live where timm is installed."""

import importlib.util
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import crossattn as xa
from crossattn.functional import bind
from experiments.parity.weights import weight
from tests.weights.golden import make_crossvit
from tests.weights.golden.make_crossvit import FILE, SMALL, image
from tests.weights.test_round_trip import same_files


def written(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def kept():
    with np.load(FILE, allow_pickle=False) as file:
        shapes = json.loads(str(file["shapes"]))
        found = {name: file[name] for name in file.files if name not in ("config", "shapes")}
        assert json.loads(str(file["config"])) == SMALL
    return {name: weight(name, tuple(shape)) for name, shape in shapes.items()}, found


def compare(folder, expected):
    model, params, _ = xa.load(folder)
    module, picture = bind(model, params), image(SMALL)
    hidden, weights = jax.jit(lambda x: module.hidden(x, return_weights=True))(picture)
    np.testing.assert_allclose(module.logits(hidden), expected["logits"], rtol=1e-4, atol=1e-4)
    for branch, read in enumerate(weights[-1]):
        np.testing.assert_allclose(read, expected[f"read by {branch}"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_computes_what_timm_computes(tmp_path):
    tensors, expected = kept()
    compare(written(tmp_path / "timm", SMALL, tensors), expected)


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("timm", "torchvision")),
    reason="timm and torchvision are not installed",
)
def test_timm_computes_what_is_kept():
    for name, x in make_crossvit.measure(SMALL)[1].items():
        np.testing.assert_allclose(x, kept()[1][name], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_is_saved_as_it_was(tmp_path):
    same_files(written(tmp_path / "timm", SMALL, kept()[0]), tmp_path)
    np.testing.assert_array_equal(
        load_file(tmp_path / "again" / "model.safetensors")["blocks.1.blocks.0.0.attn.qkv.weight"],
        weight("blocks.1.blocks.0.0.attn.qkv.weight", (36, 12)),
    )


def test_published_architectures_have_their_sizes():
    model = xa.weights.describe(dict(architecture="crossvit_9_240", num_classes=1000))
    shapes = xa.functional.flatten(xa.functional.shapes(model))
    assert sum(np.prod(x.shape, dtype=int) for x in shapes.values()) == 8_553_296
    assert shapes["large_patches.positions.table"].shape == (14 * 14 + 1, 256)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(architecture="crossvit_9_dagger_240"), "of a dagger"),
        (dict(model_args=dict(depth=[[1, 2, 1]])), "with one cross-attention each"),
        (dict(model_args=dict(crop_scale=True)), "crop_scale True, which is not supported"),
        (dict(model_args=dict(patch_size=[500, 500])), "no model that can be built"),
        (dict(model_args=3), "model_args 3; expected names"),
        (dict(architecture="swin_tiny_patch4_window7_224"), "model_type 'swin'"),
    ],
)
def test_what_is_not_done_is_one_line(change, said, tmp_path):
    folder = written(tmp_path / "timm", SMALL | change, kept()[0])
    with pytest.raises(xa.weights.CheckpointError, match=said):
        xa.load(folder)
