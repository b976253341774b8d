"""Text to speech from the command line, by a trained run.

    python -m experiments.speak --workdir=runs/speak "select the cells." --out=cells.wav
    python -m experiments.speak --workdir=runs/speak "select the cells." --out=cells.wav --plot=cells.png

A run of ``text_to_speech``. The sound is WAV at 16 kHz; its phases are guessed from the frames, without a
model (``crossattn.data.vocoder``), so it sounds hollow. ``--plot`` draws the frames, and beneath them which
letters each group of frames read. ``--seed`` draws the features that the prenet drops. The model stops by
itself, and after --max_frames at the latest.
"""

import io
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags

from crossattn import viz
from crossattn.data.mel import HOP, RATE
from crossattn.data.vocoder import LONGEST, sound_of
from crossattn.viz.writing import write_whole
from experiments import launch
from experiments.runs import MEMBER, SEED, STEP, open_run
from experiments.tasks.text_to_speech import TextToSpeechTask

_MAX_FRAMES = flags.DEFINE_integer(
    "max_frames",
    None,
    "The most frames, a hundred a second; default: the longest of the run's data.",
)
FLAGS = (launch.CONFIG, launch.WORKDIR, STEP, MEMBER, launch.OUT, launch.PLOT, _MAX_FRAMES, SEED)


def main(arguments: Sequence[str]) -> int:
    """Says a text into a file."""
    if len(arguments) != 1:
        got = f"{len(arguments)} texts" if arguments else "no text"
        raise launch.Refused(
            f'got {got}; expected one: python -m experiments.speak --workdir=RUN "a text" --out=a.wav'
        )
    drawing, out = launch.picture(), _out()
    if out is None and drawing is None:
        raise launch.Refused("neither --out nor --plot is given; name a .wav file, --out=a.wav.")
    most = _MAX_FRAMES.value
    if most is not None and not 1 <= most <= LONGEST:
        raise launch.Refused(
            f"--max_frames is {most}; expected 1 to {LONGEST}, {LONGEST * HOP // RATE} seconds."
        )
    launch.keep_compiled()
    _, task, params = open_run(TextToSpeechTask)
    (text,) = arguments
    letters = len(task.letters.prepare(text))
    length = task.letters.length(text)
    if length > letters:
        raise launch.Refused(
            f"the text has {length - 1} letters; this run has read {letters - 1} at most: cut it into"
            " sentences."
        )
    steps = None if most is None else -(-most // task.model_config.group)
    (spoken,) = task.speaker(params, 1, steps)([text], SEED.value)
    said = "" if spoken.stopped else ", which is where it was cut: the model did not stop"
    print(f"{len(spoken.frames) * HOP / RATE:.2f} s of sound{said}", flush=True)
    if out is not None:
        write(sound_of(spoken.frames), out)
    if drawing is not None:
        names = task.letters.shown(text)
        viz.save(viz.speech(spoken.frames, spoken.weights, names, title=text), drawing)
    return 0


def _out() -> Path | None:
    """Returns the file of --out, or None; raises Refused where it cannot be written."""
    if not launch.OUT.value:
        return None
    path = Path(launch.OUT.value)
    if path.suffix.lower() != ".wav":
        raise launch.Refused(f"--out names {path}; expected a name that ends in .wav.")
    launch.writable(path)
    return path


def write(sound: np.ndarray, path: Path) -> None:
    """Writes samples between -1 and 1 at 16 kHz as WAV of 16 bits."""
    samples = np.clip(np.round(sound * (2**15 - 1)), -(2**15), 2**15 - 1).astype("<i2")
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    write_whole(path, written.getvalue())


if __name__ == "__main__":
    launch.run(main)
