"""Speech from the command line: packaged weights are converted, files are heard, mistakes are one line."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile

from crossattn import functional
from crossattn.data.whisper_tokens import WhisperTokens
from experiments.fetch_weights import whisper
from experiments.transcribe import open_whisper
from tests.experiments.conftest import start
from tests.weights import checkpoints, ctranslate2_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint of a Whisper of random weights with windows of a second."""
    packed, made = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("made")
    ctranslate2_files.write_folder(packed)
    whisper.convert(packed, made)
    return made


@pytest.fixture
def wav(tmp_path):
    """Three seconds of noise in two channels at 8 kHz."""
    noise = 0.1 * np.random.default_rng(0).standard_normal((24_000, 2))
    soundfile.write(tmp_path / "noise.wav", noise, 8_000)
    return tmp_path / "noise.wav"


def test_the_checkpoint_computes_the_same_in_transformers(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    transcriber = open_whisper(str(folder))
    rng = np.random.default_rng(0)
    frames = rng.normal(size=(2, 100, 80)).astype(np.float32)
    tokens = rng.integers(0, 256, (2, 7)).astype(np.int32)
    model = transcriber.build, transcriber.params
    ours = functional.apply(*model, jnp.asarray(frames), jnp.asarray(tokens))
    with torch.no_grad():
        expected = theirs(
            torch.tensor(frames.transpose(0, 2, 1)), decoder_input_ids=torch.tensor(tokens).long()
        ).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())


def test_the_generation_config_is_what_transformers_asks_for(folder):
    content = json.loads((folder / "generation_config.json").read_text())
    tokens = WhisperTokens.load(folder)
    assert content["suppress_tokens"] == list(tokens.suppressed)
    assert content["alignment_heads"] == [[0, 0], [1, 0]] and not content["is_multilingual"]


def test_files_are_transcribed_with_times_of_words(folder, wav, capsys, tmp_path):
    assert start("transcribe", wav, f"--model={folder}") == 0
    text = capsys.readouterr().out
    assert text.strip()
    picture = tmp_path / "words.png"
    assert start("transcribe", wav, wav, f"--model={folder}", "--words", f"--plot={picture}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{wav}:" and lines[: len(lines) // 2] == lines[len(lines) // 2 :]
    assert all(line.startswith("[00:0") for line in lines[1 : len(lines) // 2])
    assert picture.stat().st_size > 1000


def test_int8_weights_are_heard_with_and_need_their_package(
    folder, wav, capsys, refused, monkeypatch
):
    pytest.importorskip("qwix")
    assert start("transcribe", wav, f"--model={folder}", "--int8") == 0
    assert capsys.readouterr().out.strip()
    held = jax.tree.leaves(open_whisper(str(folder), int8=True).params)
    whole = jax.tree.leaves(open_whisper(str(folder)).params)
    assert sum(x.nbytes for x in held) < 0.5 * sum(x.nbytes for x in whole)
    monkeypatch.setitem(sys.modules, "qwix", None)
    said = refused("transcribe", wav, f"--model={folder}", "--int8")
    assert "int8 weights need qwix: pip install" in said


def test_what_cannot_be_heard_is_refused_in_one_line(folder, wav, refused, tmp_path):
    assert "got no sound file" in refused("transcribe", f"--model={folder}")
    assert "cannot be read: No such file" in refused("transcribe", "no.wav", f"--model={folder}")
    cut = tmp_path / "cut.wav"
    cut.write_bytes(wav.read_bytes()[:-2])
    assert "is cut short" in refused("transcribe", cut, f"--model={folder}")
    bart = checkpoints.fresh(checkpoints.BART, tmp_path / "bart")
    assert "model of type 'bart'; expected 'whisper'" in refused(
        "transcribe", wav, f"--model={bart}"
    )
    assert "no packaged model 'huge'" in refused("transcribe", wav, "--model=huge")
    said = refused("transcribe", wav, f"--model={folder}", "--language=de")
    assert "only transcribes English" in said
    assert "expected one of .png" in refused("transcribe", wav, "--plot=a.txt")


def test_a_damaged_checkpoint_is_refused(folder, wav, refused, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused("transcribe", wav, f"--model={tmp_path}")
