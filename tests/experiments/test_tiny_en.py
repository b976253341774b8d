"""Whisper tiny.en on read sentences: segments and times of words, beside other code with its weights."""

import jax
import numpy as np
import pytest

from crossattn.data import fetch
from crossattn.data.speech import open_speech
from crossattn.decode.speech.transcribe import Retry
from crossattn.decode.speech.transcript import TIME
from experiments.bench import word_times
from experiments.transcribe import frames_of, open_whisper
from tests.peers import peer

FOLDER = fetch.cache_dir() / "weights" / "whisper-tiny.en"

pytestmark = pytest.mark.skipif(
    not (FOLDER.is_dir() and list(fetch.downloads_dir().glob("pocketsphinx-testdata_*.deb"))),
    reason="not fetched yet: python -m experiments.fetch_weights tiny.en, and the LibriVox sentences",
)


@pytest.fixture(scope="module", autouse=True)
def _compile_well():
    """A real model takes longer to run than to compile."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def sounds():
    return [example["audio"] for example in open_speech("librivox")]


@pytest.fixture(scope="module")
def transcriber():
    return open_whisper(str(FOLDER), words=True, previous=False, retry=Retry((0.0,), 1e9, -1e9))


@pytest.fixture(scope="module")
def heard(transcriber, sounds):
    return word_times.listen(transcriber, sounds[:2])


@pytest.fixture(scope="module")
def theirs():
    torch = peer("torch")
    transformers = peer("transformers")
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where tests run side by side
    yield transformers.WhisperForConditionalGeneration.from_pretrained(
        FOLDER, attn_implementation="eager"
    ).eval()
    torch.set_num_threads(before)


def test_a_long_recording_is_cut_as_transformers_cuts_it(transcriber, sounds, theirs):
    torch = peer("torch")
    frames = frames_of(np.concatenate([*sounds, *sounds[:3]]), transcriber)
    assert len(frames) > 3500  # more than a window
    found = theirs.generate(
        torch.tensor(frames.T.copy())[None],
        attention_mask=torch.ones(1, len(frames), dtype=torch.long),
        return_timestamps=True,
        return_segments=True,
        condition_on_prev_tokens=False,
        num_beams=1,
        do_sample=False,
    )
    (ours,) = transcriber([frames], "en")
    end = transcriber.tokens.end
    assert [(s.start, s.end, s.tokens) for s in ours.segments] == [
        (
            pytest.approx(float(s["start"])),
            pytest.approx(float(s["end"])),
            tuple(id for id in s["tokens"].tolist() if id < end),
        )
        for s in found["segments"][0]
    ]


@pytest.mark.slow
def test_tokens_begin_where_attention_computed_by_transformers_says(transcriber, heard, theirs):
    """The recipe of openai-whisper, written down again around the warping and the filter of transformers."""
    torch = peer("torch")
    generation = peer("transformers.models.whisper.generation_whisper")
    tokens, size = transcriber.tokens, transcriber.build.config.max_frames
    for one in heard:
        prefix = tokens.prefix("en", times=False)
        known = torch.tensor([[*prefix, *one.tokens, tokens.end]])
        window = np.pad(one.frames, ((0, size - len(one.frames)), (0, 0)))
        with torch.no_grad():
            found = theirs(
                torch.tensor(window.T.copy())[None],
                decoder_input_ids=known,
                output_attentions=True,
            )
        weights = torch.stack([found.cross_attentions[n][0, h] for n, h in transcriber.heads])
        weights = weights[..., : len(one.frames) // 2]
        weights = weights / weights.sum(-1, keepdim=True)
        spread, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
        smooth = generation._median_filter(((weights - mean) / spread)[None], 7)[0].mean(0)
        cost = -smooth[len(prefix) - 1 : -1].double().numpy()
        rows, places = generation._dynamic_time_warping(cost)
        starts = places[np.diff(rows, prepend=-1) > 0] * TIME
        begins = np.cumsum([0, *(len(ids) for _, ids in tokens.words(one.tokens, "en"))])
        spoken = [word for word, _ in tokens.words(one.tokens, "en")]
        expected = [
            (start, end)
            for text, start, end in zip(
                spoken, starts[begins[:-1]], starts[begins[1:]], strict=True
            )
            if text not in ".,;:!?"
        ]
        assert [(w.start, w.end) for w in one.words] == [pytest.approx(e) for e in expected]


# It leaves the file of its vocabulary open.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_word_times_are_those_of_openai_whisper(transcriber, heard):
    peer("whisper")
    align = word_times.openai_alignment(FOLDER, transcriber)
    for one in heard:
        found = align(one)
        assert [word.text for word in one.words] == [word.text for word in found]
        for ours, other in zip(one.words, found, strict=True):
            assert (ours.start, ours.end) == pytest.approx((other.start, other.end), abs=0.021)
