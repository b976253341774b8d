"""Fonts by what they cover: each text gets a list of families that together have its letters.

The user's own font family comes first, then what covers the rest: fonts shipped by the
Python packages `fontpkg-*` and `matplotlib-fontja`, then the machine's. What no font has is
written as its U+ code, with one `GlyphWarning` that names the script and what to install.

matplotlib 3.11 shapes text (joined Arabic, right to left, Devanagari conjuncts); before it,
letters are placed one by one in memory order: readable for Greek and Japanese, not for those.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from crossattn.viz.scripts import (
    GlyphWarning,
    ignorable,
    readable,
    script,
    shortened,
    spelled,
)

# Shapes of other fonts' formulas, boxes for everything, and colour bitmaps: not letters.
NOT_FOR_TEXT = ("cm", "STIX", "Last Resort", "LastResort")
PREFERRED = ("Noto Sans CJK JP", "Noto Sans CJK", "Noto Sans", "IPAex", "IPA", "Lohit", "Symbola")


@dataclass(frozen=True)
class Label:
    """A text ready to draw: its characters are in its families, but for none."""

    text: str
    families: tuple[str, ...]

    @property
    def style(self) -> dict[str, Any]:
        """Text properties for matplotlib; a dollar sign is a dollar sign, not a formula."""
        return {"family": list(self.families), "parse_math": False}


def labels(tokens: Sequence[str]) -> list[Label]:
    """Returns the tokens as labels: blanks visible, overlong ones cut, fonts chosen."""
    return _with_fonts([shortened(readable(token)) for token in tokens], cut=True)


def headline(text: str) -> Label:
    """Returns a title as a label, whole, its line breaks kept."""
    return _with_fonts([text], cut=False)[0]


def _with_fonts(texts: list[str], *, cut: bool) -> list[Label]:
    base = _base_families()
    needed = set().union(*texts) - {"\n"}
    extra, missing = _covering(needed, base)
    visible = {char for char in missing if not ignorable(char)}
    for name, install in sorted({script(char) for char in visible}):
        _warn_once(name, install)
    plain = set().union(*(_coverage(family) for family in base))
    made = []
    for text in texts:
        text = spelled(text, missing)
        text = shortened(text) if cut else text
        # A script's own font goes first, so that its words are not split between two fonts.
        letters = {char for char in text if not ignorable(char)} - {"\n"}
        used = tuple(f for f in extra if (letters - plain) & _coverage(f))
        made.append(Label(text, used + base))
    return made


@cache
def _warn_once(name: str, install: str) -> None:
    """Says once in a process that a script has no font."""
    message = f"no font on this machine has {name} characters, drawn as U+ codes: {install}"
    warnings.warn(message, GlyphWarning, stacklevel=2)


def _covering(needed: set[str], base: tuple[str, ...]) -> tuple[list[str], set[str]]:
    """Picks as few extra families as cover what base lacks; returns them and what is left."""
    left = needed.difference(*(_coverage(family) for family in base))
    if all(ignorable(char) for char in left):
        return [], left
    _find_new_fonts()
    extra = []
    candidates = [family for family in _text_families() if family not in base]
    while left and candidates:
        best = max(candidates, key=lambda family: len(left & _coverage(family)))
        if not left & _coverage(best):
            break
        extra.append(best)
        left -= _coverage(best)
    return extra, left


def _base_families() -> tuple[str, ...]:
    """The family the user set in matplotlib, then DejaVu Sans, which matplotlib brings."""
    known = {entry.name for entry in font_manager.fontManager.ttflist}
    settings = cast(dict[str, Any], matplotlib.rcParams)
    chosen = []
    for family in settings["font.family"]:
        options = settings.get(f"font.{family}", [family])  # "serif" stands for several
        chosen += [name for name in options if name in known][:1]
    return tuple(dict.fromkeys([*chosen, "DejaVu Sans"]))


def _text_families() -> list[str]:
    """Every usable family: those of Python packages first, then the preferred, then by name."""
    packaged = tuple(str(folder) for folder in _packaged_folders())
    rank = {}
    for entry in font_manager.fontManager.ttflist:
        name = entry.name
        if name.startswith(NOT_FOR_TEXT) or ("Color" in name and "Emoji" in name):
            continue
        place = next((i for i, p in enumerate(PREFERRED) if name.startswith(p)), len(PREFERRED))
        if packaged and entry.fname.startswith(packaged):
            place = -1
        rank[name] = min(rank.get(name, place), place)
    return sorted(rank, key=lambda name: (rank[name], name))


@cache
def _coverage(family: str) -> frozenset[str]:
    """The characters of a family's most regular font."""
    entries = [e for e in font_manager.fontManager.ttflist if e.name == family]
    for entry in sorted(entries, key=_irregularity):
        try:
            return frozenset(map(chr, _open(entry).get_charmap()))
        except (OSError, RuntimeError, ValueError):  # listed, but gone or broken since
            continue
    return frozenset()


def _irregularity(entry: font_manager.FontEntry) -> tuple[bool, int]:
    weight = entry.weight if isinstance(entry.weight, int) else 400
    return entry.style != "normal", abs(weight - 400)


def _open(entry: font_manager.FontEntry) -> FT2Font:
    """Opens the face of a font file; collections (.ttc) have several since matplotlib 3.11."""
    face = getattr(entry, "index", 0)
    return FT2Font(entry.fname, face_index=face) if face else FT2Font(entry.fname)


def _find_new_fonts() -> None:
    """Adds fonts installed after matplotlib made its list, and those in Python packages."""
    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    folders = [str(folder) for folder in _packaged_folders()]
    paths = font_manager.findSystemFonts(folders) if folders else []
    for path in [*paths, *font_manager.findSystemFonts()]:
        if path not in known:
            _add_font(path)


@cache
def _add_font(path: str) -> None:
    try:
        font_manager.fontManager.addfont(path)
    except (RuntimeError, NotImplementedError, OSError, ValueError, KeyError):
        return  # a bitmap or broken font: no help to us
    _coverage.cache_clear()


def _packaged_folders() -> list[Path]:
    """Folders of Python packages that bring fonts, found without importing the packages."""
    modules = [point.module for point in entry_points(group="fontpkg.family")]
    folders = []
    for module in [*modules, "matplotlib_fontja"]:
        spec = importlib.util.find_spec(module) if "." not in module else None
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent)
    return folders
