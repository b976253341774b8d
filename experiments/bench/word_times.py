"""Times of words against openai-whisper and ``transformers`` with the same weights.

    pip install openai-whisper
    python -m experiments.bench.word_times
    python -m experiments.bench.word_times base asterisk

Recordings of at most 30 seconds; libraries that are not installed are left out. openai-whisper aligns our
text; its ``transcribe`` also shortens long words at pauses and moves words to the ends of their segment.
``transformers`` gives a token the time of the next row.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crossattn.data.speech import open_speech
from crossattn.decode.speech.transcript import FRAME, Word, join_punctuation
from experiments import fetch_weights, launch
from experiments.bench.whisper_peers import installed, openai_model
from experiments.options import Options
from experiments.transcribe import frames_of, open_whisper

_WITHIN = 0.02 + 1e-6  # seconds, one vector of the encoder
_OPENING, _CLOSING = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"


class Heard(NamedTuple):
    """A recording: samples, frames [F M], tokens and words of our transcript."""

    audio: np.ndarray
    frames: np.ndarray
    tokens: list[int]
    words: list[Word]

    def window(self, size: int) -> np.ndarray:
        """Pads the frames to a window [M size]."""
        return np.ascontiguousarray(np.pad(self.frames.T, ((0, 0), (0, size - len(self.frames)))))


Aligner = Callable[[Heard], list[Word]]


def main() -> None:
    """Compares and prints."""
    parser = Options(__doc__)
    for name, choices in {"model": ("tiny.en", "base"), "set": ("librivox", "asterisk")}.items():
        parser.add_argument(name, nargs="?", default=choices[0], choices=choices)
    options = parser.parse_args()
    transcriber = open_whisper(options.model, words=True)
    sounds = [example["audio"] for example in open_speech(options.set, min_words=4)]
    recordings = listen(transcriber, sounds)
    count = sum(len(heard.words) for heard in recordings)
    print(f"{options.model}, {options.set}: {len(recordings)} recordings, {count} words")
    for name, make in installed(PEERS):
        align = make(fetch_weights.packaged(options.model), transcriber)
        theirs = [align(heard) for heard in recordings]
        print(f"  {name}: {compared([heard.words for heard in recordings], theirs)}", flush=True)


def listen(transcriber: Any, sounds: Sequence[np.ndarray]) -> list[Heard]:
    """Transcribes the recordings, and returns those that fit a window and have words."""
    found = []
    for audio in sounds:
        frames = frames_of(audio, transcriber)
        (transcript,) = transcriber([frames], "en")
        tokens = [id for segment in transcript.segments for id in segment.tokens]
        if transcript.words and len(frames) <= transcriber.build.config.max_frames:
            found.append(Heard(audio, frames, tokens, list(transcript.words)))
    return found


def compared(ours: Sequence[Sequence[Word]], theirs: Sequence[Sequence[Word]]) -> str:
    """Tells differences of begins and ends of words, over the recordings with the same words."""
    pairs = [
        (one, other)
        for own, their in zip(ours, theirs, strict=True)
        if [word.text for word in own] == [word.text for word in their]
        for one, other in zip(own, their, strict=True)
    ]
    if not pairs:
        return "no recording has the same words"
    lines = []
    for side in ("start", "end"):
        apart = np.abs([getattr(one, side) - getattr(other, side) for one, other in pairs])
        lines.append(
            f"{side}s within 0.02 s {100 * np.mean(apart <= _WITHIN):.1f} %, "
            f"median {np.median(apart):.2f} s, most {apart.max():.2f} s"
        )
    return f"{len(pairs)} words alike; {'; '.join(lines)}"


def openai_alignment(folder: Path, transcriber: Any) -> Aligner:
    """Calls ``whisper.timing.find_alignment`` with our text."""
    import torch
    from whisper import timing
    from whisper.tokenizer import get_tokenizer

    model, many = openai_model(folder), transcriber.tokens.multilingual
    tokenizer = get_tokenizer(many, language="en" if many else None, task="transcribe")
    size = transcriber.build.config.max_frames

    def align(heard: Heard) -> list[Word]:
        mel = torch.from_numpy(heard.window(size))
        timings = timing.find_alignment(model, tokenizer, heard.tokens, mel, len(heard.frames))
        timing.merge_punctuations(timings, _OPENING, _CLOSING)
        return [Word(w.word, w.start, w.end, w.probability) for w in timings if w.word]

    return align


def openai_transcribe(folder: Path, transcriber: Any) -> Aligner:
    """Calls ``whisper.transcribe`` with the samples and ``word_timestamps``."""
    import whisper

    model = openai_model(folder)
    options: dict[str, Any] = dict(language="en", fp16=False, temperature=0.0, word_timestamps=True)

    def align(heard: Heard) -> list[Word]:
        segments: Any = whisper.transcribe(model, heard.audio, **options)["segments"]
        words = [word for segment in segments for word in segment["words"]]
        return [Word(w["word"], w["start"], w["end"], w["probability"]) for w in words]

    return align


def transformers_generate(folder: Path, transcriber: Any) -> Aligner:
    """Calls ``generate`` with ``return_token_timestamps``; a word ends where the next begins."""
    import torch
    from transformers import WhisperForConditionalGeneration

    model: Any = WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = transcriber.tokens
    size = transcriber.build.config.max_frames

    def align(heard: Heard) -> list[Word]:
        features = torch.from_numpy(heard.window(size))[None]
        mask = (torch.arange(size) < len(heard.frames)).long()[None]
        told = {"language": "en"} if tokens.multilingual else {}
        written = model.generate(
            features,
            attention_mask=mask,
            num_beams=1,
            do_sample=False,
            return_token_timestamps=True,
            return_dict_in_generate=True,
            **told,
        )
        ids = [int(id) for id in written["sequences"][0]]
        times = written["token_timestamps"][0].tolist()
        spoken = [(id, time) for id, time in zip(ids, times, strict=True) if id < tokens.end]
        words = tokens.words([id for id, _ in spoken], "en")
        begins = np.cumsum([0, *(len(group) for _, group in words)])
        starts = [*(time for _, time in spoken), len(heard.frames) * FRAME]
        apart = [
            Word(text, starts[begin], starts[end], 1.0)
            for (text, _), begin, end in zip(words, begins[:-1], begins[1:], strict=True)
        ]
        return list(join_punctuation(apart))

    return align


PEERS = {
    "openai-whisper, alignment": ("whisper", openai_alignment),
    "openai-whisper, transcribe": ("whisper", openai_transcribe),
    "transformers, generate": ("transformers", transformers_generate),
}


if __name__ == "__main__":
    launch.script(main)
