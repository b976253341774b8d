"""Text to speech: the loss against numpy, scores against their definitions, and the launcher's sound."""

import wave

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import speak as config_file
from crossattn.data.errors import DataError
from crossattn.data.features import Letters
from crossattn.data.mel import HOP, log_mel
from crossattn.data.sources.tones import sound_of
from crossattn.train.alignment_losses import diagonal_attention
from experiments import speak as launcher
from experiments.bench import understood
from experiments.tasks import make_task
from experiments.tasks.text_to_speech import nearest, warped

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def workdir(trained):
    return trained(config_file.get_config("tiny"), 2)


@pytest.fixture(scope="module")
def task():
    return make_task(config_file.get_config("tiny"))


@pytest.fixture(scope="module")
def params(task):
    params = jax.jit(task.init)(jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.05 * RNG.normal(size=x.shape).astype(x.dtype), params)


@pytest.fixture(scope="module")
def batch(task):
    return next(iter(task.eval_batches("validation", None)))


def test_groups_hold_the_frames_of_the_recording_and_the_ids_those_of_its_letters(task):
    example = task.examples("validation", 1)[0]
    frames = log_mel(sound_of(example["source"]))
    groups = example["target"].reshape(-1, 80)
    np.testing.assert_array_equal(groups[: len(frames)], frames)
    assert 0 <= len(groups) - len(frames) < 4 and np.all(groups[len(frames) :] == frames.min())
    ids = task.letters.prepare("Bad  cab")
    assert ids[-1] == 1 and [task.letters.letters[i - 2] for i in ids[:-1]] == list("bad cab")


@pytest.mark.parametrize(
    ("sound", "complaint"),
    [
        (np.zeros(0, np.float32), "0 samples of sound; expected 160 or more"),
        (np.zeros(159, np.float32), "159 samples of sound; expected 160 or more"),
        (np.full(400, np.nan, np.float32), "NaN or infinite"),
        (b"no sound", "cannot be read as sound"),
    ],
)
def test_a_recording_that_is_none_is_one_line_with_its_name(monkeypatch, sound, complaint):
    task = make_task(config_file.get_config("tiny"))
    source = [{"id": "prompt-7", "text": "bad", "audio": sound}]
    monkeypatch.setattr(task.corpus, "split", lambda name: source)
    with pytest.raises(DataError, match=f"example prompt-7: .*{complaint}"):
        task.examples("train")


def test_silence_is_frames_of_one_level(monkeypatch):
    task = make_task(config_file.get_config("tiny"))
    source = [{"id": "silence", "text": "bad", "audio": np.zeros(4000, np.float32)}]
    monkeypatch.setattr(task.corpus, "split", lambda name: source)
    (example,) = task.examples("train")
    assert len(example["target"]) == 7 and np.ptp(example["target"]) == 0  # of 4 frames each


def test_sounds_and_texts_have_the_names_that_the_config_gives_them(task, monkeypatch, tmp_path):
    own = task.corpus.split("validation")[0]
    recorded = {"id": "a", "spoken": written(own["audio"], tmp_path), "words": own["text"]}
    config = config_file.get_config("tiny")
    config.data.update(sound="spoken", text="words")
    other = make_task(config)
    with pytest.raises(DataError, match="this task reads .spoken"):
        other.refuse_unready()
    monkeypatch.setattr(other.corpus, "split", lambda split: [recorded])
    other.refuse_unready()
    found, expected = other.examples("validation")[0], task.examples("validation", 1)[0]
    assert found["source"] == expected["source"]
    np.testing.assert_allclose(found["target"], expected["target"], atol=0.02)


def written(audio, folder):
    """Returns the bytes of a WAV file of 16 bits."""
    launcher.write(audio, folder / "a.wav")
    return (folder / "a.wav").read_bytes()


def test_few_examples_cost_few_spectrograms_and_none_is_made_twice(monkeypatch):
    task, made = make_task(config_file.get_config("tiny")), []
    whole = task._with_frames
    monkeypatch.setattr(task, "_with_frames", lambda each: made.append(each["id"]) or whole(each))
    first = task.examples("validation", 2)
    assert len(first) == len(made) == 2
    every = task.examples("validation")
    assert [each["id"] for each in every] == made and len(every) > 2
    assert every[0] is first[0] and len(task.examples("validation", 1)) == 1
    assert len(made) == len(every)


@pytest.mark.slow
def test_the_loss_is_that_of_its_definition(task, params, batch):
    _, sums = jax.jit(lambda p, b: task.loss(p, b, None))(params, batch)

    @jax.jit
    def outputs(params):
        model = task.bind(params)
        before = jnp.pad(batch["target"][:, :-1], [(0, 0), (1, 0), (0, 0)])
        there = dict(
            source_segment_ids=jnp.asarray(batch["source_segment_ids"]),
            target_segment_ids=jnp.asarray(batch["target_segment_ids"]),
        )
        hidden, weights = model.hidden(
            jnp.asarray(batch["source"]), before, **there, return_weights=True
        )
        groups, stop = model.logits(hidden)
        return groups, model.refine(groups, there["target_segment_ids"]), stop, weights

    groups, refined, stop, weights = map(np.float64, outputs(params))
    found = dict(loss=0.0, mel=0.0, diagonal=0.0, stop=0.0, weight=0.0)
    width = 0.2  # of the paper
    for row in range(len(groups)):
        T, S = (int((batch[f"{n}_segment_ids"][row] > 0).sum()) for n in ("target", "source"))
        true, own = np.float64(batch["target"][row, :T]), weights[:, row, :, :T, :S].mean((0, 1))
        p = 1 / (1 + np.exp(-stop[row, :T]))
        for t in range(T):
            surprise = -np.log(p[t] if t == T - 1 else 1 - p[t])
            errors = [x[row, t] - true[t] for x in (groups, refined)]
            guided = sum(
                own[t, s] * (1 - np.exp(-((t / T - s / S) ** 2) / (2 * width**2))) for s in range(S)
            )
            found["mel"] += np.abs(errors[1]).mean()
            found["stop"] += surprise
            found["loss"] += sum(np.abs(e).mean() + (e**2).mean() for e in errors) + guided
            found["loss"] += surprise * (5.0 if t == T - 1 else 1.0)
            found["diagonal"] += abs(t / T - own[t].argmax() / S) <= 0.1 + 1e-6
            found["weight"] += 1
    for name, value in found.items():
        assert float(sums[name]) == pytest.approx(value, rel=1e-4), name


@pytest.mark.slow
def test_times_teach_each_layer_which_letter_a_group_says(task, params):
    """A letter of tones lasts a group, so group t says letter t, and the end follows the last."""
    config = config_file.get_config("tiny")
    config.loss.alignment = "times"
    timed = make_task(config)
    timed.refuse_unready()
    example = timed.examples("validation", 1)[0]
    np.testing.assert_allclose(example["place"][:, 0], np.arange(len(example["target"])), atol=1e-4)
    batch = next(iter(timed.eval_batches("validation", None)))
    losses = {}
    for weight in (0.0, 1.0):
        config.loss.alignment_weight = weight
        task = make_task(config)
        losses[weight] = float(jax.jit(lambda p, b, t=task: t.loss(p, b, None))(params, batch)[0])

    @jax.jit
    def attention(params):
        there = {k: jnp.asarray(v) for k, v in batch.items() if k.endswith("segment_ids")}
        before = jnp.pad(batch["target"][:, :-1], [(0, 0), (1, 0), (0, 0)])
        given = {k: there[k] for k in ("source_segment_ids", "target_segment_ids")}
        source = jnp.asarray(batch["source"])
        return timed.bind(params).hidden(source, before, **given, return_weights=True)[1]

    weights, expected = np.float64(attention(params)).mean(2), 0.0
    for row, ids in enumerate(batch["target_segment_ids"]):
        S = int((batch["source_segment_ids"][row] > 0).sum())
        for t in range(int((ids > 0).sum())):
            near = np.exp(-((t - np.arange(S)) ** 2) / (2 * config.loss.alignment_width**2))
            own = np.log(weights[:, row, t, :S])
            expected -= (near / near.sum() * own).sum(-1).mean()
    assert losses[1.0] - losses[0.0] == pytest.approx(expected, rel=1e-4)


def test_times_that_examples_lack_are_refused(monkeypatch):
    config = config_file.get_config("tiny")
    config.loss.alignment = "times"
    task = make_task(config)
    plain = [{"id": "a", "text": "bad", "audio": sound_of("bad")}]
    monkeypatch.setattr(task.corpus, "split", lambda split: plain)
    with pytest.raises(DataError, match="examples of tones hold id, text, audio; .* reads 'times'"):
        task.refuse_unready()
    plain[0] |= {"text": "bad  cab", "times": np.arange(9) * 0.04}  # blanks are read as one
    with pytest.raises(
        DataError, match="example a has 9 times; its text has 7 letters, .* 8: when"
    ):
        task.examples("validation")


@pytest.mark.slow
def test_a_share_of_the_steps_is_not_told_the_frame_before_and_only_in_training(
    params, batch, monkeypatch
):
    config = config_file.get_config("tiny")
    config.loss.unseen = 0.5
    task, told = make_task(config), []

    class Recorded:
        def __init__(self, model):
            self.logits, self.refine = model.logits, model.refine
            self.hidden = lambda *args, **given: (
                told.append(args[1]) or model.hidden(*args, **given)
            )

    bind = task.bind
    monkeypatch.setattr(task, "bind", lambda params: Recorded(bind(params)))
    read = jax.jit(lambda params, batch, key: (task.loss(params, batch, key), told.pop())[1])
    whole, some = (np.asarray(read(params, batch, key)) for key in (None, jax.random.key(0)))
    before = np.pad(batch["target"][:, :-1], [(0, 0), (1, 0), (0, 0)])
    np.testing.assert_array_equal(whole, before)
    seen = some.any(-1)
    np.testing.assert_array_equal(some, np.where(seen[..., None], before, 0.0))
    assert 0.4 < seen[before.any(-1)].mean() < 0.6


def test_attention_on_the_diagonal_costs_nothing_and_padding_never_counts():
    eye, there = jnp.eye(5)[None], jnp.ones((1, 5), jnp.int32)
    loss, sums = diagonal_attention(eye, there, there)
    assert float(loss) == 0.0 == float(sums["diagonal"])
    corner = jnp.zeros((1, 5, 5)).at[0, 0, 4].set(1.0)
    assert float(diagonal_attention(corner, there, there)[0]) == pytest.approx(1 - np.exp(-8.0))
    padded = jnp.pad(corner, [(0, 0), (0, 2), (0, 3)], constant_values=np.nan)
    more = [jnp.pad(there, [(0, 0), (0, n)]) for n in (2, 3)]
    assert float(diagonal_attention(padded, *more)[0]) == pytest.approx(1 - np.exp(-8.0))


def test_warping_repeats_frames_at_no_cost_and_agrees_with_a_search_of_all_paths():
    x = RNG.normal(size=(6, 3))
    assert warped(np.repeat(x, [1, 3, 1, 2, 1, 2], axis=0), x) == pytest.approx(0.0, abs=1e-12)
    said, target = RNG.normal(size=(3, 2)), RNG.normal(size=(4, 2))

    def paths(i, j):
        own = np.abs(said[i] - target[j]).mean()
        if (i, j) == (0, 0):
            return [(own, 1)]
        before = [(i - 1, j - 1), (i - 1, j), (i, j - 1)]
        found = [path for place in before if min(place) >= 0 for path in paths(*place)]
        return [(cost + own, length + 1) for cost, length in found]

    cost, length = min(paths(2, 3))
    assert warped(said, target) == pytest.approx(cost / length)


def test_the_nearest_sentence_is_the_one_of_the_same_words():
    known = ["open the file", "select a cell", "close all windows"]
    assert nearest(known, ["select the cell", "close the window", "open the files"]) == [1, 2, 0]


@pytest.mark.slow
def test_a_report_scores_what_is_spoken_and_baselines_are_those_of_the_data(task, params):
    found = task.report(params, "validation", limit=3)
    assert found["spoken_texts"] == 3 and found["spoken_warped"] > 0
    assert 0 <= found["spoken_diagonal"] <= 1 and 0 <= found["spoken_stopped_near"] <= 1
    baselines = task.baselines("validation")
    frames = [e["target"].reshape(-1, 80) for e in task.examples("validation")]
    mean = np.mean([e["target"].reshape(-1, 80).mean(0) for e in task.examples("train")], 0)
    expected = np.concatenate([np.abs(f - mean).mean(-1) for f in frames]).mean()
    assert baselines["mean_frame_mel"] == pytest.approx(expected, rel=1e-5)
    assert baselines["nearest_sentence_spoken_warped"] < baselines["mean_frame_spoken_warped"]


def test_a_score_of_the_recording_itself_is_perfect(task):
    from experiments.tasks.text_to_speech import Spoken

    target = task.examples("validation", 1)[0]["target"]
    weights = np.eye(len(target))
    spoken = Spoken(target.reshape(-1, 80), weights, True)
    assert task.score(spoken, target) == {"mel": 0.0, "diagonal": 1.0, "near": 1.0}
    late = Spoken(np.repeat(target, 2, axis=0).reshape(-1, 80), np.repeat(weights, 2, 0), True)
    assert task.score(late, target)["near"] == 0.0
    wrong = Spoken(target.reshape(-1, 80), weights[::-1], False)
    score = task.score(wrong, target)
    assert score["diagonal"] < 0.5 and score["near"] == 0.0


@pytest.mark.slow
def test_the_launcher_writes_sound_and_a_picture(launched, workdir, tmp_path):
    out, plot = tmp_path / "a.wav", tmp_path / "a.png"
    code, said, err = launched(
        "speak",
        f"--workdir={workdir}",
        "bad cab",
        f"--out={out}",
        f"--plot={plot}",
        "--max_frames=10",
    )
    assert code == 0, err
    assert "s of sound" in said and plot.read_bytes().startswith(b"\x89PNG")
    with wave.open(str(out)) as file:
        assert file.getframerate() == 16000 and 0 < file.getnframes() <= 12 * HOP


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, message",
    [
        (["bad cäb"], "the text has 'ä'"),
        (["  "], "the text is empty"),
        (["bad", "--max_frames=10000"], "--max_frames is 10000; expected 1 to 6000, 60 seconds"),
        (["bad cab fade deaf egg"], "the text has 21 letters; this run has read 15 at most"),
        (["bad", "cab"], "got 2 texts; expected one"),
        ([], "got no text"),
    ],
)
def test_the_launcher_refuses_in_a_line(launched, workdir, tmp_path, given, message):
    code, _, err = launched("speak", f"--workdir={workdir}", *given, f"--out={tmp_path}/a.wav")
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_file_that_is_no_wav_and_no_file_at_all_are_refused(launched, workdir):
    code, _, err = launched("speak", f"--workdir={workdir}", "bad", "--out=a.mp3")
    assert code == 2 and "ends in .wav" in err
    code, _, err = launched("speak", f"--workdir={workdir}", "bad")
    assert code == 2 and "neither --out nor --plot" in err


def test_letters_refuse_what_they_do_not_have():
    letters = Letters("abc ", 8)
    with pytest.raises(DataError, match="'d', 'e'; expected letters of 'abc '"):
        letters.prepare("a bed")
    with pytest.raises(DataError, match="int came"):
        letters.length(3)
    with pytest.raises(DataError, match="each once"):
        Letters("aab")
    assert letters.prepare("abcabcabc").tolist() == [2, 3, 4, 2, 3, 4, 2, 1]


@pytest.mark.slow
def test_the_benchmark_hears_the_model_and_the_recordings_say_the_same_sentences(task, params):
    texts, sounds = understood.spoken(task, params, "validation", 3)
    assert texts == [example["source"] for example in task.examples("validation", 3)]
    assert [*sounds] == ["the model", "recordings, same vocoder", "recordings"]
    for text, again, own in zip(texts, *list(sounds.values())[1:], strict=True):
        np.testing.assert_array_equal(own, sound_of(text))
        assert len(own) <= len(again) < len(own) + 4 * HOP
