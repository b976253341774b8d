"""Pickled checkpoints are refused, and the line that the refusal gives converts them whole."""

import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

import crossattn as xa
from crossattn.weights import CheckpointError
from crossattn.weights.hub import refuse_pickles
from tests.peers import peer
from tests.weights import checkpoints


def line(folder):
    """Returns the command at the end of the refusal."""
    with pytest.raises(CheckpointError, match="pytorch_model.bin, a pickle") as raised:
        xa.load(folder)
    assert "\n" not in str(raised.value)
    return shlex.split(str(raised.value).partition("trust it: ")[2])


def t5(transformers):
    """T5 v1.1, whose output layer is not its embedding."""
    import torch

    config = transformers.T5Config(
        **checkpoints.T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    )
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape))
    return model, {"tie_word_embeddings": False}


def marian(transformers):
    """Its output layer has a bias, which is no parameter."""
    model = transformers.MarianMTModel(transformers.MarianConfig(**checkpoints.MARIAN))
    model.final_logits_bias.normal_()
    return model, {}


def bert(transformers):
    model = transformers.BertForMaskedLM(transformers.BertConfig(**checkpoints.BERT))
    model.cls.predictions.bias.data.normal_()
    return model, {}


@pytest.mark.parametrize("make", [t5, marian, bert])
def test_the_line_converts_the_whole_model(make, tmp_path):
    torch = peer("torch")
    transformers = peer("transformers")
    model, raw = make(transformers)
    whole, pickled = tmp_path / "whole", tmp_path / 'it\'s "pickled" $HOME'
    for folder in (whole, pickled):
        model.save_pretrained(folder)
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    config = json.loads((pickled / "config.json").read_text())
    if raw:  # as version 4 wrote it
        config.pop("scale_decoder_outputs")
    (pickled / "config.json").write_text(json.dumps(config | raw))

    program, *arguments = line(pickled)
    assert program == "python"
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=300)
    expected, found = (xa.functional.flatten(xa.load(folder)[1]) for folder in (whole, pickled))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (dict(model_type="bert", architectures=["BertModel"]), "BertModel"),
        (dict(architectures=["T5WithLMHeadModel"]), "T5ForConditionalGeneration"),
        (dict(model_type="marian"), "AutoModelForSeq2SeqLM"),
        (dict(model_type="whisper"), "AutoModelForSpeechSeq2Seq"),
        (dict(model_type="gpt2", architectures=["x; import os"]), "GPT2LMHeadModel"),
    ],
)
def test_the_class_is_that_of_the_config_or_has_its_output_layer(settings, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError) as raised:
        refuse_pickles("a", ["pytorch_model.bin"], tmp_path, to="a")
    assert re.findall(r"t\.(\w+)\.", str(raised.value)) == [name]


def test_what_is_no_checkpoint_of_weights_is_not_called_one(tmp_path):
    folder = checkpoints.fresh(checkpoints.BART, tmp_path / "bart")
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        xa.load(folder)
