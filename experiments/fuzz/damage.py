"""Ways in which a file gets damaged."""

from pathlib import Path

import numpy as np

_HOSTILE = (b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"-1", b"99999999999")


def damaged(random: np.random.Generator, content: bytes) -> tuple[bytes, str]:
    """Other bytes, and what was done; never the same ones."""
    for _ in range(20):
        name, change = _WAYS[random.integers(len(_WAYS))]
        changed = change(random, content)
        if changed != content:
            return changed, name
    return content + b"x", "a byte more"


def damage(random: np.random.Generator, path: Path) -> str:
    """Damages or deletes a file; says how."""
    if random.random() < 0.15:
        path.unlink()
        return "deleted"
    content, how = damaged(random, path.read_bytes())
    path.write_bytes(content)
    return how


def _flip(random, content):
    flipped = bytearray(content)
    for _ in range(int(random.choice([1, 1, 1, 2, 8]))):
        if flipped:
            flipped[random.integers(len(flipped))] ^= 1 << int(random.integers(8))
    return bytes(flipped)


def _truncate(random, content):
    return content[: random.integers(len(content) + 1)]


def _cut(random, content):
    start = int(random.integers(len(content) + 1))
    return content[:start] + content[start + int(random.integers(1, 64)) :]


def _zero(random, content):
    start, size = int(random.integers(len(content) + 1)), int(random.integers(1, 4096))
    return content[:start] + b"\0" * len(content[start : start + size]) + content[start + size :]


def _overwrite(random, content):
    new = _HOSTILE[random.integers(len(_HOSTILE))]
    start = int(random.integers(len(content) + 1))
    return content[:start] + new + content[start + len(new) :]


def _insert(random, content):
    start = int(random.integers(len(content) + 1))
    return content[:start] + random.bytes(int(random.integers(1, 16))) + content[start:]


def _repeat(random, content):
    start = int(random.integers(len(content) + 1))
    return content[:start] + content[start : start + 100] * 2 + content[start + 100 :]


def _digit(random, content):
    places = [i for i, byte in enumerate(content[:200_000]) if 48 <= byte < 58]
    if not places:
        return content
    at = places[random.integers(len(places))]
    return content[:at] + b"%d" % random.integers(10) + content[at + 1 :]


_WAYS = (
    ("bits flipped", _flip),
    ("bits flipped", _flip),
    ("truncated", _truncate),
    ("bytes cut out", _cut),
    ("bytes zeroed", _zero),
    ("bytes overwritten", _overwrite),
    ("bytes inserted", _insert),
    ("bytes repeated", _repeat),
    ("a digit changed", _digit),
    ("emptied", lambda random, content: b""),
)
