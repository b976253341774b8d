"""Published checkpoints of every family, trained on by the launchers, and written as such again."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import crossattn as xa
from configs import finetune, finetune_whisper, t5_1b
from crossattn.data.errors import DataError
from crossattn.functional import flatten
from experiments import tiny_checkpoints
from experiments.errors import SettingsError
from experiments.pretrained import open_checkpoint
from experiments.settings import check
from experiments.tasks import make_task
from tests.closeness import close
from tests.experiments.conftest import ROOT
from tests.peers import peer

TASKS = {
    "bert": "masked_language_model",
    "gpt2": "language_model",
    "llama": "language_model",
    "vision-encoder-decoder": "captioning",
    "whisper": "transcription",
}
ALONE = ("bert", "gpt2", "llama")
"""Kinds that read no source."""
ONE_STEP = (
    "--config.train.steps=1",
    "--config.optim.train=decoder",
    "--config.evaluate.examples=0",
    "--config.data.batch_size=2",
)
CLASSES = {
    "bart": "BartForConditionalGeneration",
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "marian": "MarianMTModel",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Writes a few sentence pairs, all of one length."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_text("".join(f"a cat {i:02}\tun chat {i:02}\n" for i in range(20)))
    return path


@pytest.fixture(scope="module")
def fine_tuned(pairs, tmp_path_factory):
    """Returns a function: kind of model -> (folder of its checkpoint, run of one step)."""
    from tests.experiments.conftest import start

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp(kind)
        given = tiny_checkpoints.write(kind, folder / "given")
        task = TASKS.get(kind, "translation")
        source = [f"--config={ROOT}/configs/finetune.py:{task},tiny"]
        if kind == "whisper":
            source = [f"--config={ROOT}/configs/finetune_whisper.py:tiny"]
        elif task != "captioning":
            source += [f"--config.data.name=files:{pairs}", "--config.data.target_len=16"]
            source += [] if kind in ALONE else ["--config.data.source_len=16"]
        steps = [x for x in ONE_STEP if kind not in ALONE or "evaluate" not in x]
        workdir = f"--workdir={folder / 'run'}"
        if task == "captioning":  # whose tables of tokens are in the decoder
            steps.append("--config.optim.train=decoder[.]decoder")
        if kind == "bert":
            steps.append("--config.optim.train=encoder")
        assert start("train", *source, *steps, f"--config.init.from={given}", workdir) == 0
        return given, folder / "run"

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny_checkpoints.known())
def test_a_step_trains_what_is_asked_for_and_the_run_is_a_checkpoint_again(
    kind, fine_tuned, launched, parameters, tmp_path
):
    given, run = fine_tuned(kind)
    before, after = flatten(xa.load(given)[1]), flatten(parameters(run))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    part = "encoder" if kind == "bert" else "decoder"
    assert changed and all(part in name for name in changed)
    assert any(
        "embedding" in name for name in before.keys() - changed
    )  # tables of tokens are taken

    code, out, err = launched("export", f"--workdir={run}", f"--to={tmp_path / 'new'}")
    assert code == 0 and f"the checkpoint is in {tmp_path / 'new'}" in out, err
    was, model = xa.weights.load(given)[0], xa.weights.load(tmp_path / "new")
    assert model[0].config == was.config
    assert (tmp_path / "new/tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    jax.tree.map(np.testing.assert_array_equal, flatten(model[1]), after)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
def test_transformers_reads_it_with_equal_logits(kind, fine_tuned, parameters, launched, tmp_path):
    torch, transformers = peer("torch"), peer("transformers")
    _, run = fine_tuned(kind)
    assert launched("export", f"--workdir={run}", f"--to={tmp_path / 'new'}")[0] == 0
    theirs = getattr(transformers, CLASSES[kind]).from_pretrained(tmp_path / "new").eval()
    model, params, _ = xa.load(tmp_path / "new")
    tokens = np.random.default_rng(0).integers(3, 250, (2, 7))
    given = {"input_ids": torch.tensor(tokens)}
    ours = (tokens,)
    if kind == "whisper":
        frames = np.random.default_rng(1).normal(size=(2, 64, 16)).astype(np.float32)
        given, ours = {"input_features": torch.tensor(frames.swapaxes(1, 2))}, (frames,)
    if kind not in ALONE:
        given["decoder_input_ids"], ours = torch.tensor(tokens[:, :5]), (*ours, tokens[:, :5])
    with torch.no_grad():
        wanted = theirs(**given).logits.numpy()
    close(xa.apply(model, params, *map(jnp.asarray, ours)), wanted)


@pytest.mark.slow
def test_a_run_goes_on_and_is_scored_without_the_folder_that_it_began_from(
    fine_tuned, launched, refused, tmp_path
):
    given, run = fine_tuned("t5")
    run, moved = shutil.copytree(run, tmp_path / "run"), given.rename(tmp_path / "elsewhere")
    saved = json.loads((run / "config.json").read_text())
    try:
        more = [f"--config.{k}={v}" for k, v in saved.items() if k in ("init.from", "data.name")]
        lengths = ("--config.data.source_len=16", "--config.data.target_len=16")
        config = (
            f"--config={ROOT}/configs/finetune.py:translation,tiny",
            *lengths,
            *ONE_STEP[1:],
            *more,
        )
        code, out, err = launched("train", *config, "--config.train.steps=2", f"--workdir={run}")
        assert code == 0 and "going on from the checkpoint of step 1" in out, err
        code, out, err = launched("evaluate", f"--workdir={run}")
        assert code == 0 and "bleu" in out, err
        shutil.rmtree(run / "assets/pretrained")
        assert "is missing, which says what" in refused("evaluate", f"--workdir={run}")
    finally:
        moved.rename(given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bart", "mbart", "t5"])
def test_the_loss_is_that_of_the_labels_that_its_tokenizer_makes(kind, pairs):
    """Compares it with the softmax of the loaded model, by its tokenizer and ``target_in``."""
    config = finetune.get_config("translation,tiny")
    config.init["from"], config.data.name = f"tiny:{kind}", f"files:{pairs}"
    config.data.update(source_len=32, target_len=32, batch_size=2)
    config.loss.label_smoothing = 0.0
    task = make_task(config)
    (batch, *_) = task.eval_batches("validation", None)
    folder = tiny_checkpoints.write(kind, pairs.parent / kind)
    model, params, tokenizer = xa.load(folder)
    loss, sums = task.loss(params, jax.tree.map(jnp.asarray, dict(batch)), None)
    source, target = (
        np.array([tokenizer.encode(f"{text} 01").ids]) for text in ("a cat", "un chat")
    )
    logits = np.asarray(
        xa.apply(model, params, jnp.asarray(source), model.target_in(target)), np.float64
    )
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, target[..., None], -1)[..., 0]
    assert sums["weight"] == target.size
    np.testing.assert_allclose(loss, nll.sum(), rtol=1e-5)


def config_of(kind, task="translation", **changes):
    """Returns a config that begins from a tiny checkpoint, or from a folder."""
    if task == "transcription":
        config = finetune_whisper.get_config("tiny")
    else:
        config = finetune.get_config(f"{task},tiny")
    config.init["from"] = kind
    with config.unlocked():
        config.tokenizer = ConfigDict()
        for name, value in changes.items():
            section, _, key = name.partition(".")
            config[section][key] = value
    return config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_of("tiny:t5", "language_model"),
         r"holds a t5 and cannot .*: Transformer has no hidden\(tokens"),
        (config_of("tiny:gpt2"), r"holds a gpt2 and cannot .*: Decoder has no hidden\(source"),
        (config_of("tiny:bert"), r"holds a bert and cannot .*: Bert has no hidden\(source"),
        (config_of("tiny:gpt2", "masked_language_model"),
         "holds a gpt2 without a head for masked tokens; expected a BertForMaskedLM"),
        (config_of("tiny:whisper"), "holds a whisper, which cannot be trained as a translation"),
        (config_of("tiny:t5", "transcription"), "holds a t5, which cannot be .* one that hears"),
        (config_of("tiny:t5", "captioning"), "holds a t5, which cannot be .* one that reads pictures"),
        (config_of("tiny:vision-encoder-decoder"), "which cannot be trained as a translation"),
        (config_of("tiny:bart", **{"data.source_len": 128}),
         "source_len is 128; the model in tiny:bart has positions for 64 tokens"),
        (config_of(None), "'pretrained', and nothing says which"),
        (config_of("tiny:gemma"), "'tiny:gemma'; expected tiny: and one of annalog, bart"),
        (config_of("tiny:t5", **{"tokenizer.target_language": "fr_XX"}),
         "tiny:t5: this tokenizer marks no language"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_sentence(config, said):
    check(config)
    with pytest.raises(SettingsError, match=said) as caught:
        make_task(config)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_tokenizer_or_with_anothers_is_refused(tmp_path):
    folder = tiny_checkpoints.write("t5", tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 200}))
    with pytest.raises(SettingsError, match="ids up to 261, its model a vocabulary of 200"):
        make_task(config_of(str(folder)))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SettingsError, match="has no tokenizer; expected tokenizer.json beside"):
        make_task(config_of(str(folder)))


def test_what_cannot_begin_from_a_checkpoint_says_so(tiny_run, refused, launched, tmp_path):
    (tmp_path / "full").write_text("")
    for to, said in (
        ([f"--to={tmp_path / 'new'}"], "has a model of its own (transformer), which is none of"),
        ([f"--to={tmp_path / 'full'}"], "is there already"),
        ([], "--to is missing"),
    ):
        assert said in refused("export", f"--workdir={tiny_run}", *to)
    config = t5_1b.get_config("tiny")
    config.model = ConfigDict({"name": "pretrained"})
    del config.tokenizer
    with pytest.raises(SettingsError, match="'pretrained', from which a denoising cannot begin"):
        check(config)


def test_languages_of_an_mbart_stand_where_its_decoder_starts():
    config = config_of("tiny:mbart", **{"tokenizer.target_language": "fr_XX"})
    checkpoint = open_checkpoint(config)
    english, french = 260, 261
    assert checkpoint.tokenizer.frame.after == (258, english)
    assert checkpoint.output_tokenizer.frame.after == (258, french)
    assert checkpoint.search(5)["bos_id"] == french
    with pytest.raises(SettingsError, match="there is no language 'de_DE'; expected one of en_XX"):
        open_checkpoint(config_of("tiny:mbart", **{"tokenizer.target_language": "de_DE"}))


def test_a_run_that_lost_what_it_began_from_is_not_begun_anew(tmp_path):
    (tmp_path / "checkpoints/4").mkdir(parents=True)
    with pytest.raises(DataError, match="pretrained is missing"):
        open_checkpoint(config_of("tiny:t5"), tmp_path / "assets")


@pytest.mark.slow
def test_a_whisper_writes_down_recordings_in_their_order():
    config = config_of("tiny:whisper", "transcription")
    task = make_task(config)
    params = task.init(jax.random.key(0))
    examples = task.examples("test", 5)
    assert examples[0]["target"].startswith(" ")
    _, together = task.texts(params, examples)
    config.evaluate.decoding.batch_size = 1
    assert together == [task.texts(params, [each])[1][0] for each in examples]
