"""An error in a checkpoint is one sentence."""

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


def test_copies_are_compared_before_anything_is_placed(folder):
    """A table over several devices is never gathered for it."""

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.shared.weight"] + 1

    def place(axes, shape):
        raise AssertionError("placed")

    with pytest.raises(CheckpointError, match="the same as model.shared.weight"):
        xa.load(checkpoints.rewrite(folder, change), place=place)


def test_an_unknown_activation(folder):
    refuses(
        configured(folder, activation_function="swoosh"), "activation_function 'swoosh'", "gelu_new"
    )


def test_an_unknown_kind_of_model(folder):
    refuses(configured(folder, model_type="mamba"), "model_type 'mamba'", "bart", "whisper")


def test_an_option_that_is_not_supported(tmp_path):
    folder = checkpoints.fresh(checkpoints.GPT2, tmp_path / "gpt2")
    configured(folder, scale_attn_by_inverse_layer_idx=True)
    refuses(folder, "scale_attn_by_inverse_layer_idx True", "not supported")


@pytest.mark.parametrize(
    "config, wrong",
    [
        (checkpoints.T5, dict(layer_norm_epsilon=float("nan"))),
        (checkpoints.T5, dict(layer_norm_epsilon="x")),
        (checkpoints.GPT2, dict(attn_pdrop=-0.1)),
        (checkpoints.LLAMA, dict(rope_theta=[1])),
    ],
)
def test_an_amount_that_is_no_number(tmp_path, config, wrong):
    folder = checkpoints.fresh(config, tmp_path / "wrong")
    [(key, value)] = wrong.items()
    refuses(configured(folder, **wrong), f"{key} {value!r}; expected a number")
    with pytest.raises(CheckpointError, match=f"{key} .*; expected a number"):
        xa.weights.describe(config | wrong)


def test_distances_that_no_bucket_is_for(tmp_path):
    folder = checkpoints.fresh(checkpoints.T5, tmp_path / "t5")
    configured(folder, relative_attention_max_distance=16)
    refuses(folder, "relative_buckets is 32 and relative_distance 16", "above the 16")


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


def without(*prefixes):
    """A change that takes tensors away."""

    def change(tensors):
        for name in [name for name in tensors if name.startswith(prefixes)]:
            del tensors[name]

    return change


UNTIED = dict(tie_word_embeddings=False)


@pytest.mark.parametrize(
    "config, lost, missing",
    [
        (checkpoints.T5 | UNTIED, "lm_head", "missing lm_head.weight"),
        (checkpoints.BART | UNTIED, "lm_head", "missing lm_head.weight"),
        (checkpoints.MARIAN | UNTIED, "lm_head", "missing lm_head.weight"),
        (checkpoints.GPT2 | UNTIED, "lm_head", "missing lm_head.weight"),
        (
            checkpoints.BERT | dict(is_decoder=True),
            "cls.predictions",
            "missing cls.predictions.bias; missing cls.predictions.transform.LayerNorm.bias",
        ),
        (
            checkpoints.BERT | dict(architectures=["BertForMaskedLM"]),
            "cls.predictions",
            "missing cls.predictions.bias",
        ),
        (
            checkpoints.BERT | dict(architectures=["BertForPreTraining"]),
            ("bert.pooler", "cls.seq_relationship"),
            "missing bert.pooler.dense.bias; missing bert.pooler.dense.weight; "
            "missing cls.seq_relationship.bias; missing cls.seq_relationship.weight",
        ),
        (checkpoints.BERT, "bert.pooler.dense.bias", "missing bert.pooler.dense.bias"),
        (
            checkpoints.MARIAN | dict(architectures=["MarianModel"]),
            "final_logits_bias",
            "missing final_logits_bias",
        ),
    ],
)
def test_a_lost_output_layer_is_missed(tmp_path, config, lost, missing):
    folder = checkpoints.fresh(config, tmp_path / "lost")
    xa.load(folder)
    refuses(
        checkpoints.rewrite(folder, without(*([lost] if isinstance(lost, str) else lost))), missing
    )


def test_an_output_layer_that_is_the_embedding_is_not_missed(tmp_path):
    """transformers 5 leaves it out of T5 v1.1 where both are equal; a model without a head had none."""
    v5 = checkpoints.T5 | dict(tie_word_embeddings=True, scale_decoder_outputs=False)
    folder = checkpoints.fresh(v5, tmp_path / "t5")
    refuses(
        configured(checkpoints.rewrite(folder, without("lm_head")), architectures=["T5Model"]),
        "missing lm_head.weight",
    )
    model, params, _ = xa.load(configured(folder, architectures=["T5ForConditionalGeneration"]))
    assert "output" not in params
    assert model.config.tie_output and model.config.output.scale == 1.0


def test_a_head_that_nothing_needs_may_be_absent(tmp_path):
    bert = checkpoints.fresh(checkpoints.BERT, tmp_path / "bert")
    _, params, _ = xa.load(checkpoints.rewrite(bert, without("cls.", "bert.pooler")))
    assert not {"output", "pooler", "next_sentence"} & params.keys()
    bart = checkpoints.fresh(checkpoints.BART, tmp_path / "bart")
    _, params, _ = xa.load(checkpoints.rewrite(bart, without("final_logits_bias")))
    assert "output" not in params


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
    path.write_text(json.dumps({"weight_map": {"a": "\ud800"}}))
    refuses(folder, "outside its folder, or one that can have no such name")
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


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(\w+\s?)*$", r"(x+x+)+y", r"(.|.)*(.|.)*z"])
def test_a_tokenizer_whose_pattern_never_ends(folder, pattern):
    """It would load, and end the first long text in a panic."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    made.pre_tokenizer = split
    made.save(str(folder / "tokenizer.json"))
    refuses(folder, "tokenizer.json is no tokenizer", "Regex search error")
