"""Recordings with their transcripts, from Debian packages: real speech, a few minutes of a speaker.

An example is {"id", "audio", "text"}: audio float32 at 16 kHz, text as its publisher wrote it.
"""

import functools
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossattn.data import archives, fetch
from crossattn.data.audio import read_audio
from crossattn.data.errors import DataError, absent

Example = dict[str, Any]


def open_speech(
    name: str, *, data_dir: str | os.PathLike | None = None, min_words: int = 1
) -> list[Example]:
    """Returns all examples of a set whose text has so many words.

    Names: "librivox", five sentences read from *Sense and Sensibility*, 16 kHz (BSD-2-Clause); "asterisk",
    the English prompts of a telephone exchange by one speaker, 8 kHz (CC BY-SA 3.0), and "asterisk/LANGUAGE",
    those of a language of ``ASTERISK_LANGUAGES``, by a speaker each.

    Raises:
      DataError: there is no such set.
      DataUnavailable: a package cannot be brought to this machine; says which file to put where.
    """
    if name not in _SETS:
        raise DataError(f"there is no set of speech {name!r}; expected one of {', '.join(_SETS)}")
    texts, sounds = _SETS[name](data_dir)
    recordings = []
    for id, text in texts.items():
        if id in sounds and len(text.split()) >= min_words:
            file = io.BytesIO(sounds[id])
            file.name = f"{name}/{id}"
            recordings.append({"id": id, "audio": read_audio(file), "text": text})
    return recordings


def _librivox(data_dir) -> tuple[dict[str, str], dict[str, bytes]]:
    (package,) = fetch.debian_packages(["pocketsphinx-testdata"], data_dir)
    files = dict(archives.read_deb(package, "usr/share/pocketsphinx/test/data/librivox/"))
    lines = _text(package, files.get("transcription")).splitlines()
    marked = [re.fullmatch(r"<s> (.*) </s> \((.*)\)", line.strip()) for line in lines]
    texts = {match[2]: match[1] for match in marked if match}
    return texts, _sounds(files)


def _asterisk(data_dir, language: str = "en") -> tuple[dict[str, str], dict[str, bytes]]:
    name = f"asterisk-core-sounds-{language}"
    listed, package = fetch.debian_packages([name, f"{name}-wav"], data_dir)
    prefix = f"usr/share/doc/{name}/core-sounds-{language}.txt.gz"
    packed = dict(archives.read_deb(listed, prefix)).get("", b"")
    try:
        raw = archives.gunzip(packed)
    except archives.Damaged:
        raw = None
    lines = _text(listed, raw).splitlines()
    pairs = (line.split(": ", 1) for line in lines if ": " in line and not line.startswith(";"))
    # Brackets describe a sound that is no speech.
    texts = {id.strip(): text.strip() for id, text in pairs if "[" not in text}
    files = archives.read_deb(package, "usr/share/asterisk/sounds/", ".wav")
    # The first folder is the speaker's.
    return texts, _sounds({name.partition("/")[2]: raw for name, raw in files})


def _text(package: Path, raw: bytes | None) -> str:
    """Returns the transcripts in a package."""
    try:
        if raw:
            return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    reason = f"{package.name} has no transcripts that can be read"
    raise absent(["the package of this name as Debian has it"], package.parent, reason)


def _sounds(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name.removesuffix(".wav"): raw for name, raw in files.items() if name.endswith(".wav")}


ASTERISK_LANGUAGES = ("en", "es", "fr", "it", "ru")
"""Languages of the sets "asterisk/LANGUAGE"."""

_SETS: dict[str, Callable] = {"librivox": _librivox, "asterisk": _asterisk} | {
    f"asterisk/{language}": functools.partial(_asterisk, language=language)
    for language in ASTERISK_LANGUAGES
}
