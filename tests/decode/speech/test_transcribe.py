"""Whisper's loop: its rules on times against transformers, and recordings of random weights."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossattn as xa
from crossattn.decode.logits.processors import Context
from crossattn.decode.speech import windows
from crossattn.decode.speech.transcribe import Retry, Transcriber
from crossattn.decode.speech.windows import time_rules
from crossattn.models import whisper
from tests import whisper_vocabulary
from tests.peers import peer

TOKENS = whisper_vocabulary.tokens()
V, FIRST = whisper_vocabulary.VOCABULARY, TOKENS.first_time
FRAMES = 100


@dataclass(frozen=True)
class Build:
    """A build with its config, as ``weights.load`` gives."""

    config: whisper.WhisperConfig

    def __call__(self, rngs):
        return whisper.Whisper(self.config, rngs=rngs)


@pytest.fixture(scope="module")
def model():
    """A Whisper of one-second windows, and random parameters."""
    small = whisper.tiny()
    text = replace(small.transformer, vocab_size=V, max_length=48)
    build = Build(replace(small, transformer=text, max_frames=FRAMES))
    return build, xa.init(build, jax.random.key(0))


def transcriber(model, **options):
    return Transcriber(*model, TOKENS, retry=Retry((0.0,), 1e9, -1e9), **options)


def recordings(*seconds, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(int(100 * s), 8)).astype(np.float32) for s in seconds]


def test_times_follow_the_rules_of_transformers():
    torch = peer("torch")
    process = peer("transformers.generation.logits_process")
    config = peer("transformers").GenerationConfig(
        no_timestamps_token_id=TOKENS.no_times,
        eos_token_id=TOKENS.end,
        bos_token_id=TOKENS.end,
        max_initial_timestamp_index=10,
    )
    theirs = process.WhisperTimeStampLogitsProcessor(config, begin_index=2)
    ours = time_rules(TOKENS, latest_first=10)
    prefix = [TOKENS.start, TOKENS.languages["en"]]
    rng = np.random.default_rng(0)
    histories = [
        [],
        [FIRST],
        [FIRST + 3, 65],
        [FIRST, 65, 66],
        [FIRST, 65, FIRST + 9],
        [FIRST, 65, FIRST + 9, FIRST + 9],
        [FIRST, 65, FIRST + 9, FIRST + 9, 66],
    ]
    for history in histories:
        for scale in (1.0, 8.0):
            logits = (scale * rng.normal(size=V)).astype(np.float32)
            tokens = np.array(prefix + history)
            padded = jnp.pad(jnp.array(tokens, jnp.int32), (0, 9 - len(tokens)))
            context = Context(padded, jnp.int32(len(tokens)), 2, jnp.int32(0))
            found = ours(jnp.array(logits), context)
            expected = theirs(torch.tensor(tokens)[None], torch.tensor(logits)[None])[0].numpy()
            np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected), str(history))


def filtered(logits, text):
    """Logits [V] after a generated text, as openai-whisper's filters leave them."""
    logits = logits.astype(np.float64)
    logits[list(TOKENS.suppressed)] = -np.inf
    logits[TOKENS.no_times] = -np.inf
    if not text:
        logits[list(TOKENS.suppressed_first)] = -np.inf
        logits[:FIRST] = -np.inf
        logits[FIRST + 51 :] = -np.inf
    timed = [token >= FIRST for token in text]
    if timed[-1:] == [True]:
        if timed[-2:-1] != [False]:
            logits[FIRST:] = -np.inf
        else:
            logits[: TOKENS.end] = -np.inf
    if times := [token for token in text if token >= FIRST]:
        logits[FIRST : times[-1] + (timed[-1] is False or timed[-2:-1] != [False])] = -np.inf
    if np.logaddexp.reduce(logits[FIRST:]) > logits[:FIRST].max():
        logits[:FIRST] = -np.inf
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [{}, {"key": jax.random.key(2), "temperature": 0.7}])
def test_a_guess_is_measured_among_the_tokens_that_the_rules_allow(model, drawn):
    """openai-whisper takes its mean of logits after its filters and before the temperature."""
    heard = windows.hear(*model, jnp.asarray(recordings(1.0, 1.0)).reshape(2, FRAMES, 8))
    prefix = jnp.array([TOKENS.prefix("en", "transcribe", times=True)] * 2, jnp.int32)
    written = windows.write(*model, heard, prefix, **drawn, tokens=TOKENS, max_new_tokens=24)
    P, bound = prefix.shape[1], xa.functional.bind(*model)
    known = jnp.concatenate([prefix, written.tokens], axis=1)[:, None]
    states = bound.prefill(2, 1, known.shape[2], encoded=heard)
    logits = np.asarray(bound.decode_step(known, states)[0])[:, 0, P - 1 : -1]
    for row in range(2):
        text, n = written.tokens[row].tolist(), int(written.lengths[row])
        own = [filtered(logits[row, t], text[:t]) for t in range(min(n + 1, len(text)))]
        log_p = [x[token] - np.logaddexp.reduce(x) for x, token in zip(own, text, strict=False)]
        assert written.log_p[row] == pytest.approx(sum(log_p) / (n + 1), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("times", [True, False])
@pytest.mark.parametrize("said", [[], [65, 66, FIRST + 9]])
def test_silence_is_likely_after_the_start_token_and_the_text_before_it(model, said, times):
    """openai-whisper reads it from the logits at the start token, wherever that stands."""
    heard = windows.hear(*model, jnp.asarray(recordings(1.0, 1.0)).reshape(2, FRAMES, 8))
    before = [TOKENS.previous, *said] if said else []
    prefix = jnp.array([[*before, *TOKENS.prefix("en", "transcribe", times=times)]] * 2, jnp.int32)
    settings = dict(tokens=TOKENS, times=times, max_new_tokens=4)
    written = windows.write(*model, heard, prefix, **settings)
    bound = xa.functional.bind(*model)
    states = bound.prefill(2, 1, prefix.shape[1], encoded=heard)
    logits = np.asarray(bound.decode_step(prefix[:, None], states)[0], np.float64)[:, 0]
    at = prefix[0].tolist().index(TOKENS.start)
    expected = np.exp(logits - np.logaddexp.reduce(logits, -1, keepdims=True))[
        :, at, TOKENS.no_speech
    ]
    np.testing.assert_allclose(written.no_speech, expected, rtol=1e-4)


@pytest.mark.slow
def test_recordings_taken_together_are_as_taken_alone(model):
    sounds = recordings(0.4, 2.5, 1.0)
    listen = transcriber(model, heads=((0, 1), (1, 0)))
    together = listen(sounds, "en")
    alone = [listen([sound], "en")[0] for sound in sounds]
    for one, other in zip(together, alone, strict=True):
        assert [s.tokens for s in one.segments] == [s.tokens for s in other.segments]
        assert [w.text for w in one.words] == [w.text for w in other.words]


@pytest.mark.slow
def test_every_window_draws_with_its_own_key_whatever_shares_its_batch(model):
    """The same sound over and over, at temperatures where every text is drawn anew."""
    (sound,) = recordings(1.0)
    listen = transcriber(model, times=False, previous=False)
    listen = replace(listen, retry=Retry((3.0, 3.001), 0.0, 0.0, 1.0), batch=2)

    def texts(sounds, **changes):
        found = replace(listen, **changes)(sounds, "en")
        return [[segment.tokens for segment in one.segments] for one in found]

    sounds = [np.concatenate([sound] * 3), sound]
    together = texts(sounds)
    drawn = [tokens for one in together for tokens in one]
    assert len(set(drawn)) == len(drawn) >= 4
    assert texts(sounds, batch=1) == together
    assert texts(sounds[:1]) == together[:1]
    [alone] = texts([sound])
    # The windows after the first may hear the next repetition, for a text may end before its window does.
    assert together[0][0] == alone[0]
    assert texts([sound], retry=Retry((3.0,), 0.0, 0.0, 1.0)) != [
        alone
    ]  # the first draw, not the second
    assert texts([sound], key=jax.random.key(1)) != [alone]


def test_segments_and_words_lie_in_the_recording_in_order(model):
    (found,) = transcriber(model, heads=((0, 1), (1, 0)))(recordings(3.3), "en")
    assert found.segments
    times = [t for s in found.segments for t in (s.start, s.end)]
    assert times == sorted(times) and 0 <= times[0] and times[-1] <= 3.3 + 1
    starts = [word.start for word in found.words]
    assert starts == sorted(starts) and "".join(w.text for w in found.words).strip() == found.text


def test_silence_says_nothing_and_is_left_out(model):
    listen = transcriber(model)
    assert listen([np.full((250, 8), -1.5, np.float32)], "en")[0].segments == ()
    quiet = transcriber(model, times=False)
    (sound,) = recordings(1.0)
    gap = np.full((100, 8), -1.5, np.float32)
    (found,) = quiet([np.concatenate([gap, sound])], "en")
    assert [(s.start, s.end) for s in found.segments] == [(1.0, 2.0)]


def test_guessed_text_is_tried_hotter_and_dropped_where_nobody_speaks(model):
    (sound,) = recordings(1.0)
    listen = replace(transcriber(model, times=False), retry=Retry((0.0, 0.4, 1.0), 1e9, 0.0, 1.0))
    assert {s.temperature for s in listen([sound], "en")[0].segments} == {1.0}
    listen = replace(listen, retry=Retry((0.0,), 1e9, 0.0, no_speech=0.0))
    assert listen([sound], "en")[0].segments == ()


def test_a_long_recording_is_taken_window_by_window(model, monkeypatch):
    """Whatever its length, the model is given one window at a time, each once, by the same programs."""
    sizes = []

    def record(name):
        original = getattr(windows, name)

        def call(build, params, array, *rest, **options):
            sizes.append((name, array.shape))
            return original(build, params, array, *rest, **options)

        monkeypatch.setattr(windows, name, call)

    for name in ("hear", "write", "follow"):
        record(name)
    seconds = 40
    options = dict(times=False, previous=False, heads=((0, 1), (1, 0)))
    (found,) = transcriber(model, **options)(recordings(seconds), "en")
    assert found.segments[-1].end == seconds
    heard = [shape for name, shape in sizes if name == "hear"]
    assert heard == [(1, FRAMES, 8)] * seconds
    assert {shape for name, shape in sizes if name != "hear"} == {(1, FRAMES // 2, 32)}
    assert len(sizes) <= 3 * seconds


def test_texts_beyond_the_positions_of_the_model_are_refused(model):
    heard = windows.hear(*model, jnp.zeros((1, FRAMES, 8)))
    known = jnp.zeros((1, 40), jnp.int32)
    written = windows.write(*model, heard, known, tokens=TOKENS, max_new_tokens=9)
    assert written.tokens.shape == (1, 9)
    with pytest.raises(ValueError, match="49.*48"):
        windows.write(*model, heard, known, tokens=TOKENS, max_new_tokens=10)
    with pytest.raises(ValueError, match="49.*48"):
        windows.follow(*model, heard, jnp.zeros((1, 49), jnp.int32), heads=((0, 0),))


def test_attention_of_words_is_a_distribution_over_the_sound(model):
    listen = transcriber(model, heads=((0, 1), (1, 0)))
    (sound,) = recordings(1.0)
    weights = listen.attention(sound, [" He", " was", "."])
    assert weights.shape == (3, 50)
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-4)
