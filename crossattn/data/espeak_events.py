"""The process in which espeak-ng's library speaks: texts in as JSON, sounds and events out, a line each.

    python espeak_events.py VOICE FOLDER_OF_ITS_DATA < texts.json

An event is [kind, first character, characters, seconds, phoneme], kind "word" or "phoneme". Only the standard
library is imported, since the process has a search path of libraries of its own.

Source: ``speak_lib.h`` of espeak-ng, whose structures and numbers these are.
"""

import base64
import ctypes
import io
import json
import sys
import wave
from typing import Any

_SYNCHRONOUS, _PHONEME_EVENTS, _CHARACTERS, _UTF8 = 2, 1, 1, 1
_KINDS = {1: "word", 7: "phoneme"}


class _Id(ctypes.Union):
    _fields_ = [("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8)]


class _Event(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _Id),
    ]


class _Voice(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("name", "languages", "identifier")),
        *((name, ctypes.c_ubyte) for name in ("gender", "age", "variant", "xx1")),
        ("score", ctypes.c_int),
        ("spare", ctypes.c_void_p),
    ]


_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


def main(voice: str, folder: str) -> int:
    """Speaks the texts of standard input."""
    library = ctypes.CDLL("libespeak-ng.so.1")
    rate = library.espeak_Initialize(
        _SYNCHRONOUS, 0, folder.encode() if folder else None, _PHONEME_EVENTS
    )
    if rate < 0:
        print(f"its data in {folder or 'their usual place'} cannot be read", file=sys.stderr)
        return 1
    language = _Voice(languages=voice.encode())  # the second try of the program, too
    if library.espeak_SetVoiceByName(voice.encode()) and library.espeak_SetVoiceByProperties(
        ctypes.byref(language)
    ):
        print("the voice does not exist", file=sys.stderr)
        return 1
    for text in json.load(sys.stdin):
        print(json.dumps(_spoken(library, rate, text.encode())), flush=True)
    return 0


def _spoken(library: Any, rate: int, text: bytes) -> dict[str, Any]:
    """Returns the sound of a text, a WAV file in base 64, and its events."""
    sound, events = bytearray(), []

    def take(samples, count, told):
        if samples:
            sound.extend(ctypes.string_at(samples, 2 * count))
        at = 0
        while told[at].type:
            event, at = told[at], at + 1
            if event.type in _KINDS:
                kind, name = _KINDS[event.type], ""
                if kind == "phoneme":
                    name = event.id.string.decode("utf-8", "replace")
                place = [event.text_position - 1, event.length]
                events.append([kind, *place, event.sample / rate, name])
        return 0

    callback = _CALLBACK(take)
    library.espeak_SetSynthCallback(callback)
    library.espeak_Synth(text, len(text) + 1, 0, _CHARACTERS, 0, _UTF8, None, None)
    file = io.BytesIO()
    with wave.open(file, "wb") as whole:
        whole.setparams((1, 2, rate, 0, "NONE", ""))
        whole.writeframes(bytes(sound))
    return {"wav": base64.b64encode(file.getvalue()).decode(), "events": events}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
