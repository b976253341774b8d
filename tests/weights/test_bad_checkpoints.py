"""What is wrong with a checkpoint is said in one sentence."""

import json
import sys

import numpy as np
import pytest

import crossattn as xa
from crossattn.weights import CheckpointError
from tests.weights import checkpoints


@pytest.fixture
def folder(tmp_path):
    return checkpoints.fresh(checkpoints.BART, tmp_path / "bart")


def configured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refuses(folder, *words):
    with pytest.raises(CheckpointError) as raised:
        xa.load(folder)
    text = str(raised.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_a_file_cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuses(folder, "model.safetensors is cut short", "fetch it again")


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>"])
def test_a_file_that_is_something_else(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refuses(folder, "no safetensors file")


def test_missing_unexpected_and_misshaped_tensors_are_all_named(folder):
    def change(tensors):
        del tensors["model.shared.weight"]
        tensors["model.extra"] = np.zeros(3, np.float32)
        tensors["model.encoder.layers.0.fc1.weight"] = np.zeros((8, 12), np.float32)
        tensors["final_logits_bias"] = np.zeros(20, np.float32)

    refuses(
        checkpoints.rewrite(folder, change),
        "missing model.shared.weight",
        "unexpected model.extra",
        "model.encoder.layers.0.fc1.weight is [8, 12] instead of [12, 8]",
        "final_logits_bias is [20] instead of [1, 20]",
    )


def test_a_layer_too_many_is_unexpected(folder):
    refuses(configured(folder, decoder_layers=0), "unexpected model.decoder.layers.0.")


def test_copies_that_differ(folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.shared.weight"] + 1

    refuses(
        checkpoints.rewrite(folder, change), "lm_head.weight", "the same as model.shared.weight"
    )


def test_an_unknown_activation(folder):
    refuses(
        configured(folder, activation_function="swoosh"), "activation_function 'swoosh'", "gelu_new"
    )


def test_an_unknown_kind_of_model(folder):
    refuses(configured(folder, model_type="llama"), "model_type 'llama'", "bart", "whisper")


def test_an_option_that_is_not_supported(tmp_path):
    folder = checkpoints.fresh(checkpoints.GPT2, tmp_path / "gpt2")
    configured(folder, scale_attn_by_inverse_layer_idx=True)
    refuses(folder, "scale_attn_by_inverse_layer_idx True", "not supported")


def test_a_config_without_a_size_or_that_is_no_json(folder):
    text = json.loads((folder / "config.json").read_text())
    del text["d_model"]
    (folder / "config.json").write_text(json.dumps(text))
    refuses(folder, "lacks d_model")
    for content in ("{", "[1]"):
        (folder / "config.json").write_text(content)
        refuses(folder, "config.json")
    (folder / "config.json").unlink()
    refuses(folder, "there is no", "config.json")


def test_pickles_are_refused_with_the_command_that_converts_them(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuses(folder, "pytorch_model.bin, a pickle", "save_pretrained", 'python -c "')


def test_an_index_that_lies(folder):
    checkpoints.shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = index | {
        "weight_map": index["weight_map"] | {"nowhere": "model-00001-of-00003.safetensors"}
    }
    path.write_text(json.dumps(moved))
    refuses(folder, "disagree about nowhere")
    path.write_text(json.dumps({"weight_map": {"a": "../../elsewhere.safetensors"}}))
    refuses(folder, "outside its folder")
    path.write_text("[]")
    refuses(folder, "no weight_map")
    path.write_text(json.dumps(index))
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuses(folder, "model-00002-of-00003.safetensors")


def test_neither_a_folder_nor_a_hub(folder, monkeypatch):
    refuses(folder / "model.safetensors", "is a file")
    refuses("./nowhere/at/all", "there is no folder")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refuses("google/flan-t5-small", "there is no folder", "crossattn[hub]")


def test_a_damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    refuses(folder, "tokenizer.json is no tokenizer")
