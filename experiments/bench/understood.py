"""Which words a recogniser understands of what a model speaks, beside the recordings that it learns from.

    python -m experiments.bench.understood runs/speak --split=test --step=best --limit=64
    python -m experiments.bench.understood runs/speech --limit=600
    python -m experiments.bench.understood runs/french_voice --model=base --language=fr

A Whisper, tiny.en unless another is named, writes down the same sentences three times: as the model speaks
them, as the recordings sound after the same vocoder (whose frames are the true ones), and as the recordings
are; of a run of transcription, only the recordings. Word errors are those of ``experiments.word_errors``,
with texts normalised alike and intervals of 95 % by a bootstrap over sentences.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from crossattn.data.features.sound import samples_of
from crossattn.data.vocoder import sound_of
from crossattn.train.evaluate import word_errors
from crossattn.train.storage import folder
from experiments import launch
from experiments.intervals import ratio
from experiments.options import Options
from experiments.runs import parameters, task_of
from experiments.tasks.text_to_speech import SpeechData, TextToSpeechTask
from experiments.tasks.transcription import TranscriptionTask
from experiments.transcribe import frames_of, open_whisper

_ROWS = 16


def main() -> None:
    """Measures and prints."""
    parser = Options(__doc__)
    parser.add_argument("run", help="work directory of text_to_speech or transcription")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    parser.add_argument("--step", default="last", metavar="STEP", help="a step, 'last' or 'best'")
    parser.add_argument("--member", metavar="NAME", help="of several seeds, seed_1; the first")
    parser.add_argument("--model", default="tiny.en", metavar="NAME", help="a Whisper; tiny.en")
    parser.add_argument("--language", default="en", metavar="CODE", help="of the texts; en")
    parser.add_argument("--limit", type=int, default=64, metavar="N", help="most sentences; 64")
    options = parser.parse_args()
    workdir = folder(options.run)
    task = task_of(workdir)
    config = task.config
    if isinstance(task, TextToSpeechTask):
        params = parameters(task, workdir, options.step, options.member)
        texts, sounds = spoken(task, params, options.split, options.limit)
    elif isinstance(task, TranscriptionTask):
        examples = task.examples(options.split, options.limit)
        texts = [task.text_of(example) for example in examples]
        sounds = {"recordings": [samples_of(example["source"]) for example in examples]}
    else:
        parser.error(
            f"the run in {workdir} is a {config.task}; expected a text_to_speech or transcription."
        )
    whisper = open_whisper(options.model)
    for name, own in sounds.items():
        heard = [
            each.text for each in whisper([frames_of(x, whisper) for x in own], options.language)
        ]
        errors, words = word_errors(texts, heard).T
        rate = ratio(100.0 * errors, words, texts)
        print(f"{name:<28} {rate} % of words, {len(texts)} sentences", flush=True)
        for text, other in list(zip(texts, heard, strict=True))[:4]:
            print(f"    {text!r}: {other.strip()!r}", flush=True)


def spoken(
    task: TextToSpeechTask, params: object, split: str, limit: int
) -> tuple[Sequence[str], Mapping[str, Sequence[np.ndarray]]]:
    """Returns sentences, and their sounds by how they are made."""
    recordings = task.corpus.split(split)
    recordings = [recordings[i] for i in range(min(limit, len(recordings)))]
    examples, M = task.examples(split, len(recordings)), task.model_config.mels
    texts = [each["source"] for each in examples]
    speak = task.speaker(params, _ROWS)
    frames = [
        each.frames
        for start in range(0, len(texts), _ROWS)
        for each in speak(texts[start : start + _ROWS], start)
    ]
    true = [example["target"].reshape(-1, M) for example in examples]
    sound, _ = SpeechData.names(task.config.data)
    return texts, {
        "the model": [sound_of(each) for each in frames],
        "recordings, same vocoder": [sound_of(each) for each in true],
        "recordings": [samples_of(each[sound]) for each in recordings],
    }


if __name__ == "__main__":
    launch.script(main)
