"""Word errors of Whisper on real speech, ours beside faster-whisper's on the same files.

    pip install crossattn[speech] faster-whisper
    python -m experiments.word_errors tiny.en base

The LibriVox sentences and the Asterisk prompts of four words or more, greedy, texts normalised as
openai-whisper does. Without faster-whisper there are only our figures. ``--sets=librivox`` takes a minute;
``--texts`` keeps every text; ``--int8`` adds a row of ours with int8 weights.
"""

import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from crossattn.data.speech import Example, open_speech
from crossattn.train.evaluate import normalised, word_error_rate
from experiments import fetch_weights, launch
from experiments.transcribe import INT8, frames_of, open_whisper

SETS = {"librivox": 1, "asterisk": 4}
"""Sets, and the fewest words of a text that is scored."""

_SETS = flags.DEFINE_list("sets", list(SETS), f"Of {' and '.join(SETS)}.")
_TEXTS = flags.DEFINE_string("texts", None, "Write every text into this JSON file.")
FLAGS = (_SETS, INT8, _TEXTS)


def main(arguments: Sequence[str]) -> int:
    launch.need("jiwer", "whisper_normalizer", "soundfile", "soxr", install="crossattn[speech]")
    launch.keep_compiled()
    if _TEXTS.value:
        launch.writable(Path(_TEXTS.value))
    kept = []
    with_peer = importlib.util.find_spec("faster_whisper") is not None
    for model in arguments or ("tiny.en", "base"):
        for name in _SETS.value:
            examples = open_speech(name, min_words=SETS.get(name, 1))
            texts = {"crossattn": ours(model, examples)}
            if INT8.value:
                texts["crossattn, int8"] = ours(model, examples, int8=True)
            if with_peer:
                texts["faster-whisper"] = faster_whisper(model, examples)
            references = [example["text"] for example in examples]
            print(f"{model}, {name}: {len(examples)} recordings", flush=True)
            for who, transcripts in texts.items():
                rate = word_error_rate(references, transcripts)
                print(f"  {who:<16} {rate:6.2f} % of words", flush=True)
            columns = [[example["id"] for example in examples], references, *texts.values()]
            rows = list(zip(*columns, strict=True))
            kept += [{"model": model, "set": name, "texts": row} for row in rows]
            for id, reference, *transcripts in rows:
                if len({normalised(text) for text in transcripts}) > 1:
                    print(f"  {id}: {reference}")
                    for who, text in zip(texts, transcripts, strict=True):
                        print(f"    {who:<14} {text}")
    if _TEXTS.value:
        Path(_TEXTS.value).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


def ours(model: str, examples: Sequence[Example], int8: bool = False) -> list[str]:
    """Transcribes recordings with this project."""
    transcriber = open_whisper(model, int8=int8)
    frames = (frames_of(example["audio"], transcriber) for example in examples)
    return [transcript.text for transcript in transcriber(frames, "en")]


def faster_whisper(model: str, examples: Sequence[Example]) -> list[str]:
    """Transcribes recordings with faster-whisper on its own files, float32, greedy."""
    import faster_whisper

    with tempfile.TemporaryDirectory() as folder:
        fetch_weights.unpack(model, Path(folder))
        whisper = faster_whisper.WhisperModel(folder, device="cpu", compute_type="float32")
        texts = []
        for example in examples:
            segments, _ = whisper.transcribe(example["audio"], beam_size=1, language="en")
            texts.append("".join(segment.text for segment in segments).strip())
        return texts


if __name__ == "__main__":
    launch.run(main)
