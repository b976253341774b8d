"""Speech to text from the command line, with Whisper.

    python -m experiments.transcribe talk.wav
    python -m experiments.transcribe a.wav b.flac --model=base --language=de --words
    python -m experiments.transcribe talk.wav --plot=attention.png
    python -m experiments.transcribe prompt.wav --workdir=runs/speech --plot=attention.png

WAV, FLAC, OGG and MP3 of any rate and length. ``--model`` is tiny.en or base, from packages, or a Whisper
checkpoint in safetensors: its folder, or its name on the Hugging Face hub. ``--workdir`` takes a run of
``transcription`` in its place, whose recordings are at most as long as its window, and have no times. Of
several files one that cannot be heard does not stop the others; the exit code is then 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from jaxtyping import Float

from crossattn import viz, weights
from crossattn.data.audio import read_audio
from crossattn.data.mel import HOP, RATE, log_mel
from crossattn.data.whisper_tokens import WhisperTokens
from crossattn.decode.speech.transcribe import Transcriber
from crossattn.decode.speech.transcript import FRAME, TIME, Transcript
from crossattn.weights.hub import find_folder
from experiments import fetch_weights, inputs, launch
from experiments.runs import MEMBER, NUM_BEAMS, STEP, open_run
from experiments.tasks.transcription import TranscriptionTask
from experiments.tasks.written import words_read

MODEL = flags.DEFINE_string(
    "model", "tiny.en", "tiny.en, base, the folder of a checkpoint, or its name on the hub."
)
LANGUAGE = flags.DEFINE_string(
    "language", None, "A code such as en; not given, that of the sound, or a run's first."
)
_TASK = flags.DEFINE_enum(
    "task", "transcribe", ["transcribe", "translate"], "Write what is said, or its English."
)
_TIMESTAMPS = flags.DEFINE_bool("timestamps", False, "A line for each phrase, with its times.")
_WORDS = flags.DEFINE_bool("words", False, "A line for each word, with its times.")
INT8 = flags.DEFINE_bool("int8", False, "Hold the weights as int8 (needs qwix).")
_OF_MODELS = (MODEL, LANGUAGE, _TASK, _TIMESTAMPS, _WORDS, INT8)
FLAGS = (*_OF_MODELS, launch.PLOT, launch.CONFIG, launch.WORKDIR, STEP, MEMBER, NUM_BEAMS)
_COLUMNS = 90  # of a picture


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        raise launch.Refused("got no sound file; name some: python -m experiments.transcribe a.wav")
    launch.need("soundfile", "soxr", install="crossattn[speech]")
    launch.keep_compiled()
    picture = launch.picture()
    if launch.WORKDIR.value:
        return _by_run(arguments, picture)
    words = _WORDS.value or picture is not None
    transcriber = open_whisper(MODEL.value, task=_TASK.value, words=words, int8=INT8.value)
    tokens = transcriber.tokens
    if LANGUAGE.value or not tokens.multilingual:
        tokens.prefix(LANGUAGE.value, _TASK.value, times=True)  # refuses what it does not know

    def use(path: str, own: Path | None) -> None:
        if len(arguments) > 1:
            print(f"{path}:", flush=True)
        frames = frames_of(read_audio(path), transcriber)
        (transcript,) = transcriber([frames], LANGUAGE.value)
        _print(transcript)
        if own:
            _draw_words(transcriber, frames, transcript, own)

    return inputs.each_file(arguments, picture, use)


def _by_run(arguments: Sequence[str], picture: Path | None) -> int:
    """Writes what each recording says as a run hears it."""
    if given := [f"--{flag.name}" for flag in _OF_MODELS if flag.present]:
        raise launch.Refused(
            f"{', '.join(given)}: for a released model, not for a run; leave that out, or --workdir."
        )
    _, task, params = open_run(TranscriptionTask)
    writer, weights = task.writer(params, NUM_BEAMS.value), task.read_weights(params)
    prompt, feature = np.array(task.prompts([], [0]), np.int32), task.features["source"]

    def use(path: str, own: Path | None) -> None:
        samples = read_audio(path)
        sound = feature.prepare(samples)[None]
        ids = writer(sound, prompt)[0]
        text = task.decoded(ids.tolist()).strip()
        print(f"{path}: {text}" if len(arguments) > 1 else text, flush=True)
        if own is None:
            return
        read = weights(sound, np.concatenate([prompt, ids[None]], 1))[0, prompt.shape[1] - 1 :]
        rows = words_read(task, ids.tolist(), read)
        if not rows:
            raise launch.Refused(f"the run hears no word in {path}, so there is nothing to draw.")
        heard = np.stack([*rows.values()])[:, : round(len(samples) / RATE / TIME)]
        _draw(heard, [*rows], own, title="cross-attention over time, the mean of layers and heads")

    return inputs.each_file(arguments, picture, use)


def open_whisper(
    name: str, *, words: bool = False, int8: bool = False, **options: Any
) -> Transcriber:
    """Loads a transcriber from packages, a folder or the hub; with ``words``, every word gets its times.

    Raises:
      Refused: there is no such model, it is no Whisper, has no tokenizer, or has no times of words.
      CheckpointError: the files do not fit together.
      ImportError: a package is missing.
    """
    folder = _folder(name)
    model, params, tokenizer = weights.load(folder, int8=int8)
    kind = model.settings["model_type"]
    if kind != "whisper":
        raise launch.Refused(f"{folder} holds a model of type {kind!r}; expected 'whisper'.")
    if tokenizer is None:
        raise launch.Refused(
            f"{folder} has no tokenizer; expected tokenizer.json, or vocab.json and merges.txt."
        )
    heads = model.settings.get("alignment_heads") or []
    if words and not heads:
        raise launch.Refused(
            f"{folder}/generation_config.json has no alignment_heads, so words have no times."
        )
    followed = tuple((layer, head) for layer, head in heads) if words else ()
    multilingual = model.settings.get("is_multilingual")
    tokens: Any = WhisperTokens(tokenizer, f"the tokenizer of {folder}", multilingual)
    return Transcriber(model, params, tokens, heads=followed, **options)


def _folder(name: str) -> Path:
    """Returns the folder of a packaged model, or of any that ``weights.load`` takes."""
    if name in fetch_weights.MODELS and not Path(name).is_dir():
        return fetch_weights.packaged(name)
    try:
        return find_folder(name)
    except weights.CheckpointError as error:
        raise launch.Refused(f"{error} From packages come tiny.en and base.") from None


def frames_of(audio: np.ndarray, transcriber: Transcriber) -> np.ndarray:
    """Computes the frames of a sound, with the loudness of a window that ends in silence."""
    config = transcriber.build.config
    silence = config.max_frames * HOP
    return log_mel(audio, config.mels, silence=silence)[: -(-len(audio) // HOP)]


def _print(transcript: Transcript) -> None:
    if _WORDS.value:
        timed: Sequence[Any] = transcript.words
    elif _TIMESTAMPS.value:
        timed = transcript.segments
    else:
        print(transcript.text, flush=True)
        return
    for own in timed:
        print(f"[{_clock(own.start)} - {_clock(own.end)}] {own.text.strip()}", flush=True)


def _draw_words(
    transcriber: Transcriber, frames: np.ndarray, transcript: Transcript, path: Path
) -> None:
    """Draws the attention of each word of the first window over time, with the word's time outlined."""
    window = frames[: transcriber.build.config.max_frames]
    words = [word for word in transcript.words if word.end <= len(window) * FRAME]
    if not words:
        raise launch.Refused("nothing was said in the first window, so there is nothing to draw.")
    seen = transcriber.attention(window, [word.text for word in words], transcript.language)
    texts = [word.text.strip() for word in words]
    title = f"cross-attention of {len(transcriber.heads)} heads over time"
    _draw(seen, texts, path, [(word.start, word.end) for word in words], title=title)


def _draw(
    seen: Float[np.ndarray, "W S"],
    texts: Sequence[str],
    path: Path,
    times: Sequence[tuple[float, float]] = (),
    *,
    title: str,
) -> None:
    """Draws the attention of texts to the encoder's vectors, with the times of texts outlined."""
    width = -(-seen.shape[1] // _COLUMNS)  # vectors of the encoder in a cell
    cells = np.add.reduceat(seen, np.arange(0, seen.shape[1], width), axis=1)
    marks = [
        f"{cell * width * TIME:.1f} s" if cell % 5 == 0 else "" for cell in range(cells.shape[1])
    ]
    links = [
        (cell, row)
        for row, (start, end) in enumerate(times)
        for cell in range(round(start / TIME) // width, round(end / TIME) // width)
        if cell < cells.shape[1]
    ]
    viz.save(viz.alignment(cells, marks, texts, links=links, title=title), path)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:02}:{minutes:02}:{seconds:05.2f}" if hours else f"{minutes:02}:{seconds:05.2f}"


if __name__ == "__main__":
    launch.run(main)
