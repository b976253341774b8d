"""A checkpoint that cannot be loaded is refused in one sentence and little memory."""

import json
import struct
import sys

import numpy as np
import pytest

import crossattn as xa
from crossattn.weights import CheckpointError
from crossattn.weights.formats import safetensors
from tests.weights import checkpoints
from tests.weights.checkpoints import BART, BERT, GPT2, LLAMA, MARIAN, T5, refused


@pytest.fixture
def folder(tmp_path):
    return checkpoints.fresh(BART, tmp_path / "bart")


def configured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refuses(folder, *words):
    text = refused(xa.load, folder)
    assert all(word in text for word in words), text


def without(*prefixes):
    """Returns a change that removes tensors."""

    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefixes)]:
            del tensors[name]

    return change


def test_a_file_that_is_cut_short_or_something_else(folder):
    path = folder / "model.safetensors"
    sizes = [struct.pack("<Q", size) + b"{}" for size in (0, 1, 2**31, 2**63, 2**64 - 1)]
    for content in (path.read_bytes()[:-100], b"", b"<html>not found</html>", *sizes):
        path.write_bytes(content)
        refuses(folder, "model.safetensors is cut short or no safetensors file", "fetch it again")


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


def test_copies_that_differ_are_refused_before_anything_is_placed(folder):
    """A table over several devices is never gathered for the comparison."""

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.shared.weight"] + 1

    def place(axes, shape):
        raise AssertionError("placed")

    with pytest.raises(CheckpointError, match="lm_head.weight .* the same as model.shared.weight"):
        xa.load(checkpoints.rewrite(folder, change), place=place)


WHOLE = "expected a whole number"


@pytest.mark.parametrize(
    ("config", "wrong", "words"),
    [
        (BART, dict(decoder_layers=0), ["unexpected model.decoder.layers.0."]),
        (BART, dict(decoder_layers=10**9), [f"{WHOLE} from 0 to", "as many as there are tensors"]),
        (BART, dict(encoder_layers=-1), [f"{WHOLE} from 0 to"]),
        (BART, dict(d_model=10**18), [f"d_model {10**18}; {WHOLE} from 0 to 2147483647"]),
        (BART, dict(d_model=2.5), [WHOLE]),
        (BART, dict(d_model="8"), [WHOLE]),
        (BART, dict(d_model=None), ["describes no bart that can be built"]),
        (BART, dict(d_model=0), ["describes no", "that can be built"]),
        (BART, dict(decoder_attention_heads=3), ["num_heads is 3; expected a divisor of dim, 8"]),
        (BART, dict(decoder_ffn_dim=[12]), [WHOLE]),
        (BART, dict(activation_function=["gelu"]), ["activation_function ['gelu']; expected one of"]),
        (BART, dict(activation_function="swoosh"), ["activation_function 'swoosh'", "gelu_new"]),
        (BART, dict(model_type=["bart"]), ["expected one of"]),
        (BART, dict(model_type="mamba"), ["model_type 'mamba'", "bart", "whisper"]),
        (GPT2, dict(scale_attn_by_inverse_layer_idx=True),
         ["scale_attn_by_inverse_layer_idx True", "not supported"]),
        (T5, dict(layer_norm_epsilon=float("nan")), ["layer_norm_epsilon nan; expected a number"]),
        (T5, dict(layer_norm_epsilon="x"), ["layer_norm_epsilon 'x'; expected a number"]),
        (T5, dict(relative_attention_max_distance=16),
         ["relative_buckets is 32 and relative_distance 16", "above the 16"]),
        (GPT2, dict(attn_pdrop=-0.1), ["attn_pdrop -0.1; expected a number"]),
        (LLAMA, dict(rope_theta=[1]), ["rope_theta [1]; expected a number"]),
    ],
)  # fmt: skip
def test_a_config_with_a_wrong_value(tmp_path, config, wrong, words):
    refuses(configured(checkpoints.fresh(config, tmp_path / "wrong"), **wrong), *words)
    if "; expected a number" in words[0]:
        assert words[0] in refused(xa.weights.describe, config | wrong)


def test_a_config_without_a_size_or_that_is_no_json(folder):
    text = json.loads((folder / "config.json").read_text())
    del text["d_model"]
    (folder / "config.json").write_text(json.dumps(text))
    refuses(folder, "lacks d_model")
    for content in ("{", "[1]"):
        (folder / "config.json").write_text(content)
        refuses(folder, "config.json")
    (folder / "config.json").write_text('{"a": ' * 100_000)
    refuses(folder, "nested too deeply")
    (folder / "config.json").unlink()
    refuses(folder, "there is no", "config.json")


UNTIED = dict(tie_word_embeddings=False)
HEADS = ["bert.pooler.dense", "cls.seq_relationship"]


@pytest.mark.parametrize(
    "config, lost, missing",
    [
        *((c | UNTIED, ["lm_head"], "missing lm_head.weight") for c in (T5, BART, MARIAN, GPT2)),
        (BERT | dict(is_decoder=True), ["cls.predictions"],
         "missing cls.predictions.bias; missing cls.predictions.transform.LayerNorm.bias"),
        (BERT | dict(architectures=["BertForMaskedLM"]), ["cls.predictions"],
         "missing cls.predictions.bias"),
        (BERT | dict(architectures=["BertForPreTraining"]), HEADS,
         "; ".join(f"missing {head}.{leaf}" for head in HEADS for leaf in ("bias", "weight"))),
        (BERT, ["bert.pooler.dense.bias"], "missing bert.pooler.dense.bias"),
        (MARIAN | dict(architectures=["MarianModel"]), ["final_logits_bias"],
         "missing final_logits_bias"),
    ],
)  # fmt: skip
def test_a_lost_output_layer_is_missed(tmp_path, config, lost, missing):
    folder = checkpoints.fresh(config, tmp_path / "lost")
    xa.load(folder)
    refuses(checkpoints.rewrite(folder, without(*lost)), missing)


def test_an_output_layer_that_is_the_embedding_is_not_missed(tmp_path):
    """transformers 5 leaves it out of T5 v1.1 where both are equal; a model without a head had none."""
    v5 = T5 | dict(tie_word_embeddings=True, scale_decoder_outputs=False)
    folder = checkpoints.rewrite(checkpoints.fresh(v5, tmp_path / "t5"), without("lm_head"))
    refuses(configured(folder, architectures=["T5Model"]), "missing lm_head.weight")
    model, params, _ = xa.load(configured(folder, architectures=["T5ForConditionalGeneration"]))
    assert "output" not in params
    assert model.config.tie_output and model.config.output.scale == 1.0


def test_a_head_that_nothing_needs_may_be_absent(tmp_path):
    for config, lost in ((BERT, ("cls.", "bert.pooler")), (BART, ("final_logits_bias",))):
        folder = checkpoints.fresh(config, tmp_path / config["model_type"])
        _, params, _ = xa.load(checkpoints.rewrite(folder, without(*lost)))
        assert not {"output", "pooler", "next_sentence"} & params.keys()


def test_an_index_that_lies(folder):
    checkpoints.shard(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = {"weight_map": index["weight_map"] | {"nowhere": "model-00001-of-00003.safetensors"}}
    for content, said in (
        (json.dumps(index | moved), "disagree about nowhere"),
        (json.dumps({"weight_map": {"a": "../../elsewhere.safetensors"}}), "outside its folder"),
        (json.dumps({"weight_map": {"a": "\ud800"}}), "or one that can have no such name"),
        ("[]", "no weight_map"),
        ("[" * 100_000, "is no index"),
        ('{"weight_map": ' + "[" * 100_000, "is no index"),
    ):
        path.write_text(content)
        refuses(folder, said)
    path.write_bytes(b"\xff{}")
    refuses(folder, "is no index")
    path.write_text(json.dumps(index))
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuses(folder, "model-00002-of-00003.safetensors is named in the index but missing")


def safetensors_of(path, dtype, size):
    head = {"some.weight": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}
    raw = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))


@pytest.mark.parametrize(
    "dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3"]
)
def test_types_that_mean_nothing_without_scales_are_refused_by_name(tmp_path, dtype):
    size = {"F4": 4, "F6_E2M3": 6}.get(dtype, 8)
    safetensors_of(tmp_path / "model.safetensors", dtype, size)
    said = f"has some.weight in {dtype}; expected F64, F32, F16 or BF16"
    assert said in refused(safetensors.open_folder, tmp_path)


def test_types_that_the_models_compute_in_are_read(tmp_path):
    for dtype, size in (("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2)):
        safetensors_of(tmp_path / "model.safetensors", dtype, 8 * size)
        [(name, tensor)] = safetensors.open_folder(tmp_path).read({"some.weight"})
        assert (name, tensor.shape) == ("some.weight", (8,))


def test_integers_in_the_place_of_parameters(folder):
    def quantise(tensors):
        name = "model.encoder.layers.0.fc1.weight"
        tensors[name] = (tensors[name] * 100).astype(np.int8)

    words = "fc1.weight in ", "has dtype int8; expected floating-point"
    refuses(checkpoints.rewrite(folder, quantise), *words)


def test_neither_a_folder_nor_a_hub(folder, monkeypatch):
    refuses(folder / "model.safetensors", "is a file")
    refuses("./nowhere/at/all", "there is no folder")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refuses("google/flan-t5-small", "there is no folder", "crossattn[hub]")
