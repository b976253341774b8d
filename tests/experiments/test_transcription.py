"""Speech to text from nothing: what is heard and written, its baselines, and sounds that are none."""

import io
import math
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import speech
from crossattn.data.errors import DataError
from crossattn.data.mel import RATE, log_mel, mel_centres
from crossattn.data.sources import tones
from crossattn.train.errors import MissingPackage
from crossattn.train.evaluate import word_errors
from crossattn.train.storage import folder
from experiments import train, transcribe
from experiments.bench import understood
from experiments.errors import SettingsError
from experiments.intervals import ratio
from experiments.runs import parameters
from experiments.settings import check
from experiments.tasks import make_task
from experiments.tasks.augmentation import warped
from tests.experiments.conftest import ROOT
from tests.peers import package

soundfile = package("soundfile", "speech")
package("jiwer", "speech")
CONFIG = f"--config={ROOT}/configs/speech.py:tiny"


@pytest.fixture(scope="module")
def task():
    return make_task(speech.get_config("tiny"))


@pytest.mark.slow
def test_the_model_hears_the_window_and_the_decoder_writes_the_text(task):
    item = next(iter(task.numbered_batches("validation", None)))
    batch = {name: jnp.asarray(array) for name, array in item.batch.items()}
    assert batch["source"].shape == (8, 60, 40)
    first = task.examples("validation")[int(item.indices[0])]
    tokenizer = task.corpus.tokenizer
    told = batch["target_out"][0][batch["target_segment_ids"][0] > 0].tolist()
    assert tokenizer.decode(told).strip() == first["target"].strip()
    params = jax.jit(task.init)(jax.random.key(0))
    model = task.bind(params)
    arrays = (batch["target_segment_ids"], batch["target_positions"])

    def logits(sound):
        hidden = model.hidden(
            sound, batch["target_in"], target_segment_ids=arrays[0], target_positions=arrays[1]
        )[0]
        return model.logits(hidden)

    heard, silence = logits(batch["source"]), logits(batch["source"] * 0)
    assert heard.shape == (*batch["target_in"].shape, tokenizer.vocab_size)
    assert jnp.abs(heard - silence).max() > 1e-3


def test_stretched_frequencies_are_those_of_the_sound_at_other_pitches():
    key, hertz, warp = jax.random.key(3), mel_centres(40), 0.2
    tone = np.sin(2 * np.pi * 1500 * np.arange(RATE // 4) / RATE).astype(np.float32)
    frames = np.concatenate([log_mel(tone, 40), np.zeros((5, 40), np.float32)])
    found = jax.jit(warped, static_argnums=2)(jnp.tile(frames, (32, 1, 1)), key, warp)
    assert found.shape == (32, 30, 40) and not found[:, 25:].any()
    stretches = np.exp(jax.random.uniform(key, 32, minval=-warp, maxval=warp))
    assert stretches.min() < 0.9 and stretches.max() > 1.1
    for sound, stretch in zip(np.asarray(found), stretches, strict=True):
        expected = [np.interp(hertz * stretch, hertz, frame) for frame in frames]
        np.testing.assert_allclose(sound, expected, atol=1e-4)
        loudest = hertz[sound[10].argmax()]
        assert abs(np.log(loudest * stretch / 1500)) < np.log(hertz[-1] / hertz[-2])


def test_sounds_are_stretched_in_training_alone(task):
    config = speech.get_config("tiny")
    config.data.warp = 0.3
    other, params = make_task(config), jax.jit(task.init)(jax.random.key(0))
    batch = next(iter(task.numbered_batches("validation", None))).batch
    plain, stretched = (
        [float(jax.jit(t.loss)(params, batch, key)[0]) for key in (None, jax.random.key(0))]
        for t in (task, other)
    )
    assert plain[0] == stretched[0] and abs(plain[1] - stretched[1]) > 1e-4


def test_values_of_other_names_are_heard_and_written(task):
    config = speech.get_config("tiny")
    config.data.update(sound="sound", text="caption")
    other = make_task(config)
    example = {"id": "a", "sound": np.ones(400, np.float32), "caption": "A bus.", "family": "bus"}
    assert other.renamed(example) | {"source": 0} == {
        "id": "a", "group": "bus", "source": 0, "target": " A bus.",
    }  # fmt: skip
    with pytest.raises(
        DataError, match="hold id, audio, text, times, translation; this task reads 'sound'"
    ):
        other.refuse_unready()


@pytest.mark.slow
def test_times_teach_each_layer_where_a_token_is_said():
    """A letter of tones lasts two vectors of the encoder, so letters a to b have their middle at a + b."""
    config = speech.get_config("tiny")
    config.loss.alignment, losses = "times", {}
    timed = make_task(config)
    timed.refuse_unready()
    example, tokenizer = timed.examples("validation")[0], timed.corpus.tokenizer
    ids, end, expected = tokenizer.encode(example["target"]), 0, []
    for count, id in enumerate(ids, 1):
        end = len(tokenizer.decode(ids[:count]).strip())
        expected.append(2 * end - len(tokenizer.decode([id]).strip()))
    assert len(expected) < len(example["target"])  # a token of several letters among them
    np.testing.assert_allclose(example["place"][:, 0], [*expected, 2 * end], atol=1e-4)

    with pytest.raises(DataError, match="example a has 5 times; its text has 3 letters"):
        timed.renamed({"id": "a", "audio": None, "text": " bad", "times": np.zeros(5)})
    params = jax.jit(timed.init)(jax.random.key(0))
    batch = next(iter(timed.numbered_batches("validation", None))).batch
    for weight in (0.0, 1.0):
        own = {
            name: value for name, value in batch.items() if weight or not name.startswith("place")
        }
        config.loss.update(alignment="times" if weight else "none", alignment_weight=weight)
        task = make_task(config)
        loss, sums = jax.jit(lambda p, b, t=task: t.loss(p, b, None))(params, own)
        losses[weight] = float(loss)
        assert float(sums["loss"]) == losses[weight]

    arrays = {name: jnp.asarray(array) for name, array in batch.items()}
    named = ("target_segment_ids", "target_positions")
    _, weights = timed.bind(params).hidden(
        arrays["source"],
        arrays["target_in"],
        **{name: arrays[name] for name in named},
        return_weights=True,
    )
    surprise, width = 0.0, config.loss.alignment_width
    for row, ids in enumerate(batch["target_segment_ids"]):
        for t in np.flatnonzero(ids):
            far = batch["place"][row, t, 0] - np.arange(weights.shape[-1])
            near = np.exp(-((far / width) ** 2) / 2)
            own = np.log(np.float64(weights[:, row, :, t]).mean(1))
            surprise -= (near / near.sum() * own).sum(-1).mean()
    assert losses[1.0] - losses[0.0] == pytest.approx(surprise, rel=1e-4)


@pytest.mark.parametrize("missing", ["sacrebleu.metrics", "jiwer"])
def test_a_package_of_scores_that_is_missing_is_named_before_the_run(missing, monkeypatch):
    config = speech.get_config("tiny")
    config.evaluate.examples = 1
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingPackage, match=missing.partition(".")[0]):
        make_task(config).refuse_unready()


def test_translation_hears_french_stamps_and_writes_english_captions():
    config = speech.get_config("translate")
    check(config)
    assert config.data.name == "stamps/en" and config.data.options.to_dict() == {"voice": "fr"}


@pytest.mark.parametrize("name", ["transformer", "decoder", "vit"])
def test_a_model_that_does_not_hear_is_refused(name):
    config = speech.get_config("tiny")
    config.model = {"name": name}
    with pytest.raises(SettingsError) as caught:
        check(config)
    assert "\n" not in str(caught.value)


def test_the_nearest_sound_of_a_training_sound_is_itself_at_any_loudness_and_speed(task):
    train_split = task.examples("train")
    whole = [train_split[i]["target"].strip() for i in range(len(train_split))]
    texts = [text for text in whole if len(text) < 11][:12]
    for speak in (tones.sound_of, lambda text: 0.3 * tones.sound_of(text), _slowly):
        assert [whole[i] for i in task._nearest([speak(text) for text in texts])] == texts


def _slowly(text):
    """The tones of a text, each half as long again."""
    length = len(tones.sound_of("a"))
    parts = [tones.sound_of(letter) for letter in text]
    return np.concatenate([np.concatenate([part, part[: length // 2]]) for part in parts])


def test_baselines_are_texts_of_the_training_split(task):
    found = task.baselines("test")
    references = [each["target"].split() for each in task.examples("test")]
    most = max(
        (each["target"] for each in task.examples("train")),
        key=[each["target"] for each in task.examples("train")].count,
    ).split()

    def distance(a, b):
        rows = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            last, rows[0] = rows[0], i
            for j, y in enumerate(b, 1):
                last, rows[j] = rows[j], min(rows[j] + 1, rows[j - 1] + 1, last + (x != y))
        return rows[-1]

    errors = sum(distance(each, most) for each in references)
    expected = 100 * errors / sum(map(len, references))
    assert found["most_frequent_wer"] == pytest.approx(expected)
    assert {"nearest_wer", "nearest_chrf"} <= found.keys()


def test_a_report_has_the_interval_of_word_errors_over_sentences(task, monkeypatch):
    every = task.examples("test", 6)
    examples = [{**each, "group": str(row // 2)} for row, each in enumerate(every)]
    said = [each["target"] if row < 4 else "nothing of it" for row, each in enumerate(examples)]
    monkeypatch.setattr(task, "texts", lambda *_: (examples, said))
    monkeypatch.setattr(task, "split_loss", lambda *_: {"loss": 0.0})
    monkeypatch.setattr(task, "outcomes", lambda *_: {})
    found = task.report({}, "test", limit=6)
    errors, words = word_errors([each["target"] for each in examples], said).T
    expected = ratio(100 * errors, words, [each["group"] for each in examples])
    assert found["wer"] == pytest.approx(expected.value) and expected.value > 0
    assert (found["wer_low"], found["wer_high"]) == (expected.low, expected.high)
    assert found["wer_low"] == 0 < found["wer"] < found["wer_high"]


def test_whisper_writes_down_the_recordings_of_a_run(task, monkeypatch, capsys):
    references = [each["target"] for each in task.examples("test", 4)]
    heard = iter([*references[:3], "nothing"])

    def whisper(recordings, language):
        return [SimpleNamespace(text=next(heard)) for _ in recordings]

    monkeypatch.setattr(understood, "task_of", lambda _: task)
    monkeypatch.setattr(understood, "open_whisper", lambda _: whisper)
    monkeypatch.setattr(understood, "frames_of", lambda audio, _: audio)
    monkeypatch.setattr(sys, "argv", ["understood", "runs/speech", "--limit=4"])
    understood.main()
    errors, words = word_errors(references, [*references[:3], "nothing"]).T
    rate = ratio(100 * errors, words, [text.strip() for text in references])
    assert f"recordings {rate} % of words, 4 sentences" in " ".join(capsys.readouterr().out.split())


def ogg(samples, rate):
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "sound",
    [
        np.zeros(1, np.float32),
        np.zeros(8000, np.float32),
        ogg(np.zeros(1), 16000),
        ogg(np.sin(np.arange(20000) * 0.1), 44100),
        ogg(np.sin(np.arange(2000) * 0.3), 8000),
    ],
    ids=["one sample", "silence", "a file of one sample", "44.1 kHz", "8 kHz"],
)
def test_any_sound_is_heard(task, sound):
    window = task.features["source"].prepare(sound)
    assert window.shape == (60, 40) and np.isfinite(window).all()


@pytest.mark.parametrize(
    ("sound", "complaint"),
    [
        (b"no sound at all", "cannot be read as sound"),
        (b"", "cannot be read as sound"),
        (np.zeros(0, np.float32), "0.00 s of sound; expected some, 0.6 s at most"),
        (np.zeros(16000, np.float32), "1.00 s of sound; expected some, 0.6 s at most"),
        (np.full(400, np.nan, np.float32), "NaN or infinite"),
        (np.zeros((2, 400), np.float32), r"shape \[2, 400\]"),
        (np.zeros(400, np.int16), "int16; expected floats"),
    ],
)
def test_what_is_no_sound_is_one_line(task, sound, complaint):
    with pytest.raises(DataError, match=complaint) as caught:
        task.features["source"].prepare(sound)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_tones_are_learnt_from_nothing_and_not_by_a_blind_model(tmp_path):
    errors = {}
    for blind in (False, True):
        config = speech.get_config("tiny")
        config.data.blind = blind
        config.train.steps, config.evaluate.examples = 400, 12
        errors[blind] = train.run(config, tmp_path / str(blind)).evaluation["wer"]
    assert errors[False] < 50 < errors[True] and math.isfinite(errors[True])


@pytest.fixture(scope="module")
def workdir(trained):
    return trained(speech.get_config("tiny"), 60)


def test_a_run_writes_down_files_and_draws_what_each_word_reads(
    workdir, task, launched, tmp_path, monkeypatch
):
    examples = task.examples("validation", 2)
    files = [str(tmp_path / f"{name}.wav") for name in "ab"]
    for path, example in zip(files, examples, strict=True):
        soundfile.write(path, example["source"], 16000, subtype="FLOAT")
    drawn, run = [], f"--workdir={workdir}"
    monkeypatch.setattr(transcribe.viz, "save", lambda figure, path: drawn.append(path))
    monkeypatch.setattr(
        transcribe.viz, "alignment", lambda *given, **options: drawn.append((given, options))
    )
    code, out, err = launched("transcribe", *files, run, f"--plot={tmp_path}/read.png")
    params = parameters(task, folder(workdir))
    _, texts = task.texts(params, examples)
    assert out.splitlines() == [f"{f}: {t.strip()}" for f, t in zip(files, texts, strict=True)]
    assert code == int(not all(texts)), err
    said = [text for text in texts if text.strip()]
    assert len(drawn) == 2 * len(said) > 0
    (cells, marks, words), _ = drawn[0]
    assert cells.shape == (len(words), len(marks)) and marks[0] == "0.0 s"
    assert words[0] == said[0].split()[0]
    # An attention's row is a distribution over the window, of which silence after the sound is cut.
    assert np.all(cells.sum(-1) <= 1 + 1e-5) and np.all(cells.sum(-1) > 0)


def test_what_is_of_a_model_is_refused_with_a_run(workdir, refused, tmp_path):
    said = refused(
        "transcribe", f"{tmp_path}/a.wav", f"--workdir={workdir}", "--words", "--model=base"
    )
    assert "--model, --words: for a released model, not for a run" in said


def test_sound_that_is_longer_than_the_window_is_one_line(workdir, refused, tmp_path):
    soundfile.write(tmp_path / "long.wav", np.ones(16000 * 2, np.float32) * 0.1, 16000)
    said = refused("transcribe", f"{tmp_path}/long.wav", f"--workdir={workdir}")
    assert "2.00 s of sound; expected some, 0.6 s at most" in said
