"""Speech from the command line: packaged weights are converted, files are heard, mistakes are one line."""

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile

from crossattn import functional
from crossattn.data.audio import read_audio
from crossattn.data.sources import espeak
from crossattn.data.sources.espeak import Word
from crossattn.data.whisper_tokens import WhisperTokens
from crossattn.decode.speech import windows
from experiments import transcribe
from experiments.bench import alignment_heads, lag
from experiments.fetch_weights import whisper
from experiments.inputs import each_file
from experiments.transcribe import frames_of, open_whisper
from tests import whisper_vocabulary
from tests.experiments import ctranslate2_files
from tests.experiments.conftest import start
from tests.experiments.test_explore import views_of
from tests.peers import package, peer
from tests.viz.test_explore import weights_of
from tests.weights import checkpoints


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
    torch = peer("torch")
    transformers = peer("transformers")
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


# A random model writes characters that no font has.
any_character = pytest.mark.filterwarnings("ignore::crossattn.viz.GlyphWarning")


@pytest.mark.slow
@any_character
def test_files_are_transcribed_with_times_of_words(folder, wav, capsys, tmp_path):
    assert start("transcribe", wav, f"--model={folder}") == 0
    text = capsys.readouterr().out
    assert text.strip()
    picture = tmp_path / "words.png"
    assert start("transcribe", wav, f"--model={folder}", "--words", f"--plot={picture}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("[00:0") for line in lines)
    assert picture.stat().st_size > 1000


@pytest.mark.slow
def test_phrases_are_told_with_their_times(folder, wav, capsys):
    assert start("transcribe", wav, f"--model={folder}", "--timestamps") == 0
    said = capsys.readouterr().out
    transcriber = open_whisper(str(folder))
    (heard,) = transcriber([frames_of(read_audio(wav), transcriber)], "en")
    assert len(heard.segments) >= 3  # of one-second windows
    assert said == "".join(
        f"[00:{s.start:05.2f} - 00:{s.end:05.2f}] {s.text.strip()}\n" for s in heard.segments
    )


@pytest.mark.slow
def test_a_sound_is_explored_in_every_head(folder, wav, launched, tmp_path):
    out = tmp_path / "page.html"
    code, _, err = launched("explore", wav, f"--model={folder}", f"--out={out}")
    assert code == 0, err
    (view,) = views_of(out)
    whisper_of = open_whisper(str(folder), words=True)
    frames = frames_of(read_audio(wav)[:16_000], whisper_of)  # a window of this model
    (heard,) = whisper_of([frames], "en")
    said = [word for word in heard.words if word.text.strip()]
    assert [token for token, _ in view["tokens"]] == [w.text.strip() for w in said]
    assert view["memory"]["times"] == [[w.start, w.end] for w in said]
    seen = whisper_of.head_attention(frames, [w.text for w in said])
    aligned = [weights_of(view)[layer, head] for layer, head in whisper_of.heads]
    np.testing.assert_allclose(aligned, seen, atol=1 / 500)
    # The probability of a word is the product of those of its tokens, with all heads and without each.
    tokens, (build, params) = whisper_of.tokens, (whisper_of.build, whisper_of.params)
    ids = [tokens.encode(word.text) for word in said]
    prefix = tokens.prefix("en", "transcribe", times=False)
    longest = build.config.transformer.max_length
    text = jnp.array([[*prefix, *sum(ids, [])][:longest]])
    missing = build.config.max_frames - len(frames)
    window = jnp.pad(frames, ((0, missing), (0, 0)))[None]
    flat, name = functional.flatten(params), "decoder.stack.layers.1.cross.out.kernel"
    zeroed = functional.nest(flat | {name: jnp.asarray(flat[name]).at[0].set(0)})
    for p, found in (
        (params, view["knockouts"]["whole"]),
        (zeroed, view["knockouts"]["probabilities"][1][0]),
    ):
        log_p = jax.nn.log_softmax(functional.apply(build, p, window, text[:, :-1])[0])
        own = np.asarray(log_p)[np.arange(text.shape[1] - 1), text[0, 1:]][len(prefix) - 1 :]
        ends = np.cumsum([0, *map(len, ids)])
        words = [np.exp(own[a:b].sum()) for a, b in zip(ends, ends[1:], strict=False)]
        np.testing.assert_allclose(found, words, atol=2e-4)
    bad = tmp_path / "bad.wav"
    bad.write_text("not sound")
    code, _, err = launched("explore", bad, f"--model={folder}", f"--out={out}")
    assert code == 2 and err.startswith(f"error: {bad} cannot be read as sound")


@pytest.mark.slow
@any_character
def test_a_bad_file_does_not_stop_the_others_and_each_has_its_picture(
    folder, wav, launched, tmp_path
):
    bad, other = tmp_path / "bad.wav", tmp_path / "other.flac"
    bad.write_text("not sound at all")
    soundfile.write(other, *soundfile.read(wav))
    drawn = tmp_path / "drawn.svg"
    code, out, err = launched("transcribe", wav, bad, other, f"--model={folder}", f"--plot={drawn}")
    assert code == 1 and err.count("\n") == 1
    assert err.startswith(f"error: {bad} cannot be read as sound")
    first, _, second = (out.partition(f"{p}:\n")[2] for p in (wav, bad, other))
    assert second.strip() and first.startswith(second)
    names = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert names == ["drawn-noise.svg", "drawn-other.svg"]


def test_pictures_of_sounds_that_are_called_the_same_are_numbered():
    path = Path("a/words.png")
    for drawing, names in ((None, [None, None]), (path, ["words-1.png", "words-2.png"])):
        given = {}
        assert each_file(["x.wav", "b/x.wav"], drawing, given.__setitem__) == 0
        assert [*given.values()] == [name and Path("a") / name for name in names]


def test_silence_says_nothing(folder, launched, tmp_path):
    soundfile.write(tmp_path / "quiet.wav", np.zeros(48_000), 16_000)
    for flags, said in ((["--words"], ""), (["--timestamps"], ""), ([], "\n")):
        found = launched("transcribe", tmp_path / "quiet.wav", f"--model={folder}", *flags)
        assert found == (0, said, "")


@pytest.mark.parametrize(("samples", "rate"), [(1, 16_000), (1, 8_000), (3, 192_000)])
def test_a_sound_of_no_length_is_a_line_at_most(folder, launched, tmp_path, samples, rate):
    soundfile.write(tmp_path / "click.wav", np.full(samples, 0.5), rate)
    code, out, err = launched("transcribe", tmp_path / "click.wav", f"--model={folder}")
    assert code in (0, 2) and len((out + err).splitlines()) <= 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("module", "extra", "options"),
    [("soundfile", "speech", ()), ("soxr", "speech", ()), ("matplotlib", "viz", ["--plot=a.png"])],
)
def test_a_missing_package_is_told_before_anything_is_done(
    module, extra, options, refused, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(transcribe, "open_whisper", lambda *_, **__: pytest.fail("it began"))
    said = refused("transcribe", "no.wav", *options)
    assert said == f"error: {module} is not installed: pip install 'crossattn[{extra}]'\n"


@pytest.fixture(scope="module")
def multilingual(folder, tmp_path_factory):
    """The same, said to know two languages."""
    made = shutil.copytree(folder, tmp_path_factory.mktemp("many") / "made")
    path = made / "generation_config.json"
    tokens = WhisperTokens.load(folder)
    content = json.loads(path.read_text()) | {
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": id for code, id in tokens.languages.items()},
        "task_to_id": tokens.tasks,
    }
    path.write_text(json.dumps(content))
    return made


@pytest.mark.slow
def test_a_task_and_a_language_are_told_to_the_model(multilingual, wav, capsys, monkeypatch):
    told, write = [], windows.write

    def writing(build, params, encoded, prefix, *rest, **options):
        told.append(prefix[0, -2:].tolist())
        return write(build, params, encoded, prefix, *rest, **options)

    monkeypatch.setattr(windows, "write", writing)
    options = f"--model={multilingual}", "--language=de", "--task=translate"
    assert start("transcribe", wav, *options) == 0
    assert capsys.readouterr().out.strip()
    backend = whisper_vocabulary.backend()
    expected = [backend.token_to_id(f"<|{name}|>") for name in ("de", "translate")]
    assert len(told) >= 3 and all(ids == expected for ids in told)


def test_the_language_that_is_found_is_that_of_transformers(multilingual, wav, capsys):
    torch = peer("torch")
    transformers = peer("transformers")
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(multilingual).eval()
    transcriber = open_whisper(str(multilingual))
    frames = frames_of(read_audio(wav), transcriber)
    first = torch.tensor(frames[:100].T.copy())[None]
    id = int(theirs.detect_language(first, generation_config=theirs.generation_config))
    language = {id: code for code, id in transcriber.tokens.languages.items()}[id]
    assert transcriber([frames])[0].language == language
    said = []
    for option in ((), (f"--language={language}",)):
        assert start("transcribe", wav, f"--model={multilingual}", *option) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_a_name_on_the_hub_is_fetched(folder, wav, capsys, refused, monkeypatch):
    def list_repo_files(name):
        if name != "someone/whisper":
            raise OSError(f"no repository {name}")
        return [path.name for path in folder.iterdir()]

    def snapshot_download(name, local_files_only=False, **_):
        if local_files_only:
            raise FileNotFoundError("nothing was fetched before")
        return str(folder)

    hub: Any = types.ModuleType("huggingface_hub")
    hub.list_repo_files, hub.snapshot_download = list_repo_files, snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert start("transcribe", wav, "--model=someone/whisper") == 0
    assert capsys.readouterr().out.strip()
    said = refused("transcribe", wav, "--model=someone/else")
    assert "someone/else is neither a folder nor to be had from the hub: no repository" in said
    assert "From packages come tiny.en and base." in said
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = refused("transcribe", wav, "--model=huge")
    assert "there is no folder huge; if it is a name on the Hugging Face hub: pip install" in said


@pytest.mark.slow
def test_a_vocabulary_in_two_files_is_read(folder, wav, capsys, refused, tmp_path):
    """As fine-tuned checkpoints have it, without tokenizer.json."""
    made = shutil.copytree(folder, tmp_path / "made")
    (made / "tokenizer.json").unlink()
    assert "has no tokenizer; expected tokenizer.json, or vocab.json and merges.txt" in refused(
        "transcribe", wav, f"--model={made}"
    )
    whisper_vocabulary.save_apart(made)
    said = []
    for source in (folder, made):
        assert start("transcribe", wav, f"--model={source}") == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


@pytest.mark.slow
def test_int8_weights_are_heard_with_and_need_their_package(
    folder, wav, capsys, refused, monkeypatch
):
    package("qwix", "weights")
    assert start("transcribe", wav, f"--model={folder}", "--int8") == 0
    assert capsys.readouterr().out.strip()
    held = jax.tree.leaves(open_whisper(str(folder), int8=True).params)
    whole = jax.tree.leaves(open_whisper(str(folder)).params)
    assert sum(x.nbytes for x in held) < 0.5 * sum(x.nbytes for x in whole)
    monkeypatch.setitem(sys.modules, "qwix", None)
    said = refused("transcribe", wav, f"--model={folder}", "--int8")
    assert "int8 weights need qwix: pip install" in said


def test_heads_are_chosen_by_the_times_of_a_voice_and_written_where_others_read_them(
    folder, capsys, monkeypatch, tmp_path
):
    said = ["to be or not", "it is a key", "a cat sat by", "we go in now"]

    def speak(texts, voice):
        rng = np.random.default_rng(len(voice))
        times = [Word(text, 0.2 * i, 0.2 * i + 0.2) for i, text in enumerate("abcd")]
        return [
            (
                0.1 * rng.standard_normal(14_000).astype(np.float32),
                [time._replace(text=own) for time, own in zip(times, text.split(), strict=True)],
            )
            for text in texts
        ]

    monkeypatch.setattr(espeak, "timed", speak)
    monkeypatch.setattr(espeak, "all_sentences", lambda: said)
    monkeypatch.setattr(espeak, "split_of", lambda text: "train" if "t" in text else "test")
    monkeypatch.setattr(alignment_heads, "_LETTERS", (5, 50))
    out = tmp_path / "made"
    monkeypatch.setattr(sys, "argv", ["x", str(folder), "--other=b", f"--out={out}"])
    alignment_heads.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chosen by 3 sentences: [[") and len(lines) == 1 + 2 * 5 + 1
    assert lines[1] == "en-us: 1 sentences, 4 words" and "in proportion" in lines[5]
    heads = open_whisper(str(out), words=True).heads
    assert lines[0].endswith(str([*map(list, heads)]))
    before, after = (json.loads((f / "generation_config.json").read_text()) for f in (folder, out))
    assert after == before | {"alignment_heads": [*map(list, heads)]}
    transformers = peer("transformers")
    theirs = transformers.GenerationConfig.from_pretrained(out)
    assert theirs.alignment_heads == [*map(list, heads)]
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_what_is_written_at_the_end_of_a_sound_is_the_offline_text(folder, wav, monkeypatch):
    monkeypatch.setattr(lag, "_LONGEST", 40)
    whisper, audio = open_whisper(str(folder), words=True), read_audio(wav)[:15_000]
    policies = [lag.AlignAtt(1, whisper.heads), lag.WaitK(1, unit=5), lag._ALL]
    soon, steady, last = lag.live(whisper, policies, audio, 0.25)
    frames = np.pad(frames_of(audio, whisper), ((0, 6), (0, 0)))
    encoded = windows.hear(whisper.build, whisper.params, frames[None])
    prefix = jnp.array([whisper.tokens.prefix(times=False)])
    expected = windows.write(
        whisper.build, whisper.params, encoded, prefix,
        tokens=whisper.tokens, times=False, max_new_tokens=lag._LONGEST,
    )  # fmt: skip
    ids = expected.tokens[0, : expected.lengths[0]].tolist()
    assert last[0] == whisper.tokens.decode(ids) and last[0]
    assert set(last[1]) == {0.94}  # all of the sound, in vectors
    assert steady[1] == sorted(steady[1]) and steady[1][0] < 0.94
    assert soon[1] == sorted(soon[1]) and all(t in (0.26, 0.5, 0.76, 0.94) for t in soon[1])


def test_spoken_words_are_found_among_the_words_of_tokens():
    words = [
        ("The", [1]),
        (" key", [2, 3]),
        (",", [4]),
        (" of", [5]),
        (" the", [6]),
        (" pad", [7, 8]),
    ]
    found = alignment_heads.rows_of(words, ["the", "key", "of the", "pad"])
    np.testing.assert_array_equal(found, [[0, 1], [1, 3], [4, 6], [6, 8]])
    assert alignment_heads.rows_of(words, ["the", "ke", "y", "of the", "pad"]) is None
    assert alignment_heads.rows_of(words, ["the", "key"]) is None


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
    for flag in ("--language=de", "--task=translate"):
        said = refused("transcribe", "no.wav", f"--model={folder}", flag)
        assert "only transcribes English" in said
    (tmp_path / "text.mp3").write_text("not sound at all")
    said = refused("transcribe", tmp_path / "text.mp3", f"--model={folder}")
    assert "text.mp3 cannot be read as sound" in said and "expected WAV, FLAC, OGG or MP3" in said
    assert "expected one of .png" in refused("transcribe", wav, "--plot=a.txt")
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused("transcribe", wav, f"--model={damaged}")
