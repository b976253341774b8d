"""Short sentences of LibreOffice's help, read by voices of espeak-ng: "espeak/en-us,en+f3".

Every voice reads every sentence of its splits. A sentence is in one split, by the hash of its letters,
whoever reads it: 10 % test, 5 % validation. The program of a machine that lacks it comes from Debian's
packages; what it says is kept in the data folder. Silence before and after the words is cut.
"""

import base64
import functools
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int16

from crossattn.data import archives, espeak_events, fetch
from crossattn.data.audio import read_audio
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.mel import HOP, RATE
from crossattn.data.sources import Example, MappedSource, Option, hashed_split
from crossattn.files import put_folder

FORM = "espeak/VOICE,..."
OPTIONS = {
    "longest": Option(int, "The most letters of a sentence.", "[10, 200]"),
    "sentences": Option(int, "Training sentences, at equal distances; 0 is all.", "[0, inf)"),
    "words": Option(
        int, "Sentences of so many most frequent words alone; 0 is any words.", "[0, inf)"
    ),
    "turns": Option(bool, "Each training sentence is read by one of the voices, in turn."),
    "held_out": Option(
        str, "Voices of validation and test, A,B; 'none' takes the training voices."
    ),
}
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.?'"
"""The letters of the sentences, which are in small letters."""

_MARKS = " ,.;:?!"
_SILENT = 0.01  # of the loudest sample
_TOGETHER = 256  # texts of a process, whose sounds are in memory
_VOICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+-]*")


def open_split(
    rest: str,
    split: str,
    *,
    data_dir: Any = None,
    longest: int = 40,
    sentences: int = 0,
    words: int = 0,
    turns: bool = False,
    held_out: str = "none",
) -> Sequence[Example]:
    """Returns examples {"id", "text", "family", "voice", "audio", "times"}, of about 2 s.

    The family is the text, since what several voices say is one sentence; "audio" is float32 at 16 kHz,
    "times" [letters + 1] of ``letter_times``.
    """
    apart = [] if held_out == "none" else held_out.split(",")
    for voice, count in Counter([*rest.split(","), *apart]).items():
        if count > 1:
            raise DataError(
                f"the voice {voice!r} is named {count} times in espeak/{rest} and data.options.held_out"
                f" {held_out!r}; name each voice once."
            )
    voices = rest.split(",") if split == "train" else apart or rest.split(",")
    texts = [text for text in all_sentences(data_dir) if len(text) <= longest]
    texts = of_words(texts, words) if words else texts
    texts = [text for text in texts if split_of(text) == split]
    if sentences and split == "train":
        texts = spread(texts, sentences)
    turns = turns and split == "train"
    own = {voice: texts[i :: len(voices)] if turns else texts for i, voice in enumerate(voices)}
    sounds = {voice: _Kept(voice, tuple(read), data_dir) for voice, read in own.items()}
    most = max(map(len, own.values()))
    places = [(n, voice) for n in range(most) for voice in voices if n < len(own[voice])]

    def example(place: tuple[int, str]) -> Example:
        number, voice = place
        text, said = own[voice][number], sounds[voice][number]
        name = f"{split}/{voice}/{number}"
        return {"id": name, "text": text, "family": text, "voice": voice, **said}

    return MappedSource(places, example)


def spread(texts: Sequence[str], count: int) -> list[str]:
    """Returns ``count`` of the texts at equal distances, or all."""
    return [texts[i * len(texts) // count] for i in range(min(count, len(texts)))]


def split_of(text: str) -> str:
    """Returns the split of a sentence, from its letters alone."""
    return hashed_split(re.sub("[^a-z]", "", text.lower()), test=10, validation=5)


def of_words(texts: Sequence[str], count: int) -> list[str]:
    """Returns the texts whose words are all among the ``count`` most frequent of them."""
    found = Counter(word for text in texts for word in _words(text))
    known = {word for word, _ in found.most_common(count)}
    return [text for text in texts if known.issuperset(_words(text))]


def _words(text: str) -> list[str]:
    return re.findall("[a-z']+", text)


def sounding(audio: Float[np.ndarray, " samples"]) -> slice:
    """Returns the part without the silence around it."""
    loud = np.flatnonzero(np.abs(audio) > _SILENT * np.abs(audio).max())
    return slice(max(loud[0] - HOP, 0), loud[-1] + 2 * HOP) if len(loud) else slice(None)


Events = Sequence[Sequence[Any]]


class Word(NamedTuple):
    """A word of a sound: its letters, and the seconds at which it begins and ends."""

    text: str
    start: float
    end: float


def timed(
    texts: Sequence[str], voice: str, data_dir: Any = None
) -> list[tuple[Float[np.ndarray, " samples"], list[Word]]]:
    """Returns what a voice says at 16 kHz, and its words with the times that the synthesiser tells.

    A word lasts from its first phoneme to that of the next word, or to a pause. Two that espeak-ng says as
    one, such as "of the", are one.

    Raises:
        DataError: espeak-ng has no such voice.
        DataUnavailable: there is no espeak-ng here, or not its library, and no apt to bring it.
    """
    found = _spoken(texts, voice, data_dir)
    return [
        (audio, words_of(text, events)) for text, (audio, events) in zip(texts, found, strict=True)
    ]


def _spoken(
    texts: Sequence[str], voice: str, data_dir: Any
) -> list[tuple[Float[np.ndarray, " samples"], Events]]:
    """Returns what a voice says at 16 kHz, and the synthesiser's events."""
    folder, environment = _installed(voice, data_dir)
    command = [sys.executable, espeak_events.__file__, voice, str(folder or "")]
    given = json.dumps(list(texts)).encode()
    done = subprocess.run(command, input=given, capture_output=True, env=environment)
    _refuse_failed(done, voice)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(read_audio(io.BytesIO(base64.b64decode(x["wav"]))), x["events"]) for x in found]


def lettered(
    texts: Sequence[str], voice: str, data_dir: Any = None
) -> list[tuple[Float[np.ndarray, " samples"], Float[np.ndarray, " ends"]]]:
    """Returns what a voice says, without the silence around it, and the ``letter_times`` of each text.

    Raises: as ``timed``.
    """
    found = []
    for text, (audio, events) in zip(texts, _spoken(texts, voice, data_dir), strict=True):
        part = sounding(audio)
        times = letter_times(text, events) - np.float32((part.start or 0) / RATE)
        found.append((audio[part], times))
    return found


def words_of(text: str, events: Events) -> list[Word]:
    """Returns the words of events (kind, first character, characters, seconds, phoneme), in order.

    espeak-ng tells of a word before its first phoneme; the names of pauses begin with "_".
    """
    return [Word(said, times[0], times[-1]) for _, said, times in _said(text, events)]


def letter_times(text: str, events: Events) -> Float[np.ndarray, " ends"]:
    """Returns the second at which each letter begins, and the last ends.

    The letters of a word share its phonemes evenly, whose times the synthesiser tells; what stands between
    two words shares the pause.
    """
    places, seconds = [0.0], [0.0]
    for first, said, times in _said(text, events):
        places.extend(first + np.linspace(0.0, len(said), len(times)))
        seconds.extend(times)
    order = np.maximum.accumulate
    return np.interp(np.arange(len(text) + 1), order(places), order(seconds)).astype(np.float32)


def _said(text: str, events: Events) -> list[tuple[int, str, list[float]]]:
    """Returns the words: first character, letters, when each phoneme begins, and when the last ends."""
    found: list[tuple[int, list[float]]] = []
    told: Any = None
    begun: Any = None
    for kind, first, _, seconds, phoneme in events:
        pause = phoneme.startswith("_")
        if kind == "word":
            told = first if told is None else told
        elif pause or told is not None:
            if begun is not None:
                found.append((begun[0], [*begun[1], seconds]))
            begun = None if pause else (told, [seconds])
            told = told if pause else None
        elif begun is not None:
            begun[1].append(seconds)
    firsts = [first for first, _ in found] + [len(text)]
    return [
        (first, text[first:end].strip(_MARKS), times)
        for (first, times), end in zip(found, firsts[1:], strict=True)
    ]


def _installed(voice: str, data_dir: Any) -> tuple[Path | None, dict[str, str]]:
    """Returns the folder of the data of an espeak-ng that is not installed, and its environment."""
    if not _VOICE.fullmatch(voice):
        raise DataError(f"there is no voice {voice!r}; expected one of espeak-ng, such as en-us+f3")
    program, environment = fetch.debian_program("espeak-ng", data_dir)
    own = [path.parent for path in program.parents[1].glob("lib/*/espeak-ng-data")]
    fetched = program.is_relative_to(fetch.cache_dir(data_dir))
    return own[0] if own and fetched else None, environment


def _refuse_failed(done: subprocess.CompletedProcess, voice: str) -> None:
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "replace").split()) or "it says nothing"
        if "voice" in said:
            raise DataError(f"espeak-ng has no voice {voice!r} ({said})")
        raise DataUnavailable(f"espeak-ng does not run ({said})")


class _Kept:
    """The sounds of texts, and the times of their letters, made once for all runs."""

    def __init__(self, voice: str, texts: tuple[str, ...], data_dir: Any):
        named = hashlib.sha256("\n".join((voice, *texts)).encode()).hexdigest()[:16]
        folder = fetch.cache_dir(data_dir) / "espeak" / f"{voice}-{named}-times"
        if not folder.is_dir():
            _keep(_made(texts, voice, data_dir), folder)
        self._samples = np.load(folder / "samples.npy", mmap_mode="r")
        self._ends = np.load(folder / "ends.npy")
        self._times = np.load(folder / "times.npy", mmap_mode="r")
        self._letter_ends = np.cumsum([len(text) + 1 for text in texts])

    def __getitem__(self, number: int) -> dict[str, Float[np.ndarray, " n"]]:
        samples = _part(self._samples, self._ends, number)
        times = np.array(_part(self._times, self._letter_ends, number))
        return {"audio": samples.astype(np.float32) / 2**15, "times": times}


def _part(values: np.ndarray, ends: np.ndarray, number: int) -> np.ndarray:
    return values[ends[number - 1] if number else 0 : ends[number]]


def _made(texts: Sequence[str], voice: str, data_dir: Any) -> dict[str, list[np.ndarray]]:
    """Returns the sounds of texts without the silence around them, and when their letters begin."""
    sounds, letters = [], []
    for start in range(0, len(texts), _TOGETHER):
        for audio, times in lettered(texts[start : start + _TOGETHER], voice, data_dir):
            sounds.append(_rounded(audio))
            letters.append(times)
    return {"samples": sounds, "times": letters}


def _rounded(audio: Float[np.ndarray, " samples"]) -> Int16[np.ndarray, " samples"]:
    return np.clip(np.round(audio * 2**15), -(2**15), 2**15 - 1).astype(np.int16)


def _keep(parts: dict[str, list[np.ndarray]], folder: Path) -> None:
    """Writes arrays of each text into a folder, which is there when it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as temporary:
        whole = Path(temporary) / "whole"
        whole.mkdir()
        for name, arrays in parts.items():
            np.save(
                whole / f"{name}.npy", np.concatenate(arrays) if arrays else np.zeros(0, np.int16)
            )
        lengths = [len(sound) for sound in parts["samples"]]
        np.save(whole / "ends.npy", np.cumsum(lengths, dtype=np.int64))
        put_folder(whole, folder)


@functools.lru_cache(maxsize=1)
def all_sentences(data_dir: Any = None) -> Sequence[str]:
    """Returns the help's short sentences in small letters, each once."""
    from crossattn.data.sources import libreoffice_help as help

    (package,) = fetch.debian_packages(["libreoffice-help-en-us"], data_dir)
    pages = archives.read_deb(package, f"{help.PREFIX}en-US/text/", ".html")
    texts = (each.text for each in help.read_pages(pages).values() if each)
    return list(dict.fromkeys(text.lower() for text in texts if is_sentence(text)))


def is_sentence(text: str) -> bool:
    """Whether a text is words alone, three or more in at most 200 letters, the first with a capital."""
    words = re.fullmatch(r"[A-Z][a-z']*(?:,? [a-z][a-z']*){2,}[.?]?", text)
    return bool(words) and 12 <= len(text) <= 200
