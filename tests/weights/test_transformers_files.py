"""Checkpoints that transformers wrote: loaded and saved again they are the same files, and it reads them."""

import dataclasses
import filecmp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from tests.peers import peer

torch = peer("torch")
transformers = peer("transformers")

from crossattn.weights.pretrained import _FILE_OF  # noqa: E402
from experiments.parity import ours, reference  # noqa: E402  (it needs torch)
from experiments.parity.__main__ import compare, differences  # noqa: E402
from experiments.parity.cases import CASES, FRAMES, MELS  # noqa: E402
from tests.closeness import close  # noqa: E402
from tests.weights import checkpoints  # noqa: E402


@checkpoints.each(CASES, every=6)
def test_a_file_of_transformers_is_written_again_to_the_bit(case, tmp_path):
    theirs = reference.build(case, tmp_path / "theirs")
    model, params, _ = xa.load(tmp_path / "theirs")
    again = xa.save(tmp_path / "again", model, params)
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert filecmp.cmpfiles(tmp_path / "theirs", again, names, shallow=False) == (names, [], [])

    read, info = getattr(transformers, case.model).from_pretrained(again, output_loading_info=True)
    assert not any(info.values()), info
    wanted = theirs.state_dict()
    assert read.state_dict().keys() == wanted.keys()
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


@checkpoints.each(CASES, every=6)
def test_transformers_reads_a_fresh_model_of_every_family(case, tmp_path):
    cls = getattr(transformers, case.model)
    config = cls.config_class(**case.config).to_dict() | {"architectures": [case.model]}
    model = xa.weights.describe(config)
    folder = xa.save(tmp_path, model, xa.init(model, jax.random.key(0)))
    theirs, info = cls.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    counts = {name for name in info["missing_keys"] if name.endswith("num_batches_tracked")}
    info["missing_keys"] -= counts  # of training batches, which only a file that was read has
    assert not any(info.values()), info
    for module in theirs.modules():  # sinusoids of TrOCR, which it leaves without numbers
        if isinstance(getattr(module, "weights", None), torch.Tensor):
            module.weights = None
    expected = reference.arrays(case, reference.outputs(case, theirs.eval()))
    errors = compare(ours.outputs(case, *xa.load(folder)[:2]), expected)
    assert differences(errors | {"loss": 0.0}) == []  # a mean that is 0 of some


def test_every_family_of_transformers_has_a_case():
    kinds = {getattr(transformers, case.model).config_class.model_type for case in CASES}
    halves = {"trocr"}  # of a captioner
    assert kinds | halves >= _FILE_OF.keys() & set(transformers.CONFIG_MAPPING)


def test_whisper_has_no_use_for_scale_embedding(tmp_path):
    [case] = [case for case in CASES if case.name == "Whisper, gelu"]
    theirs = reference.build(
        dataclasses.replace(case, config=case.config | {"scale_embedding": True}), tmp_path
    )
    model, params, _ = xa.load(tmp_path)
    frames = np.random.default_rng(0).standard_normal((2, FRAMES, MELS)).astype(np.float32)
    tokens = np.array([[3, 4, 5], [6, 7, 8]])
    with torch.no_grad():
        wanted = theirs(
            input_features=torch.tensor(frames).transpose(1, 2),
            decoder_input_ids=torch.tensor(tokens),
        ).logits
    found = xa.apply(model, params, jnp.asarray(frames), jnp.asarray(tokens))
    close(found, wanted, ulps=1000)  # of a whole model, in float32 on both sides


@pytest.mark.parametrize(
    "kind", "bart blenderbot gpt2 marian mbart mt5 mvp pegasus plbart t5 whisper".split()
)
def test_a_config_that_names_no_dropout_has_that_of_transformers(kind):
    theirs = transformers.AutoConfig.for_model(kind)
    sizes = checkpoints.ALL | {"mt5": checkpoints.T5}
    config = xa.weights.describe(sizes.get(kind, checkpoints.BART) | {"model_type": kind}).config
    names = {"t5": "dropout_rate", "mt5": "dropout_rate", "gpt2": "resid_pdrop"}
    block = getattr(config, "transformer", config).block
    assert block.dropout_rate == getattr(theirs, names.get(kind, "dropout"))
