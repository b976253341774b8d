"""Figures without pyplot, and labels in any script, with the font families that together have their letters.

matplotlib draws each letter with the first family of a list that has it. The list ends with the user's
``font.family`` and DejaVu Sans. Letters that these lack come from the Python packages `fontpkg-*` and
`matplotlib-fontja`, then from the machine's fonts. A letter that no font has is written as its U+ code.
"""

import contextlib
import io
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from typing import Any, cast

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "crossattn.viz draws with matplotlib, which is not installed: pip install matplotlib",
        name="matplotlib",
    ) from error
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from crossattn.viz.checks import GlyphWarning

INK, GREY, GRID = "#222222", "#666666", "#dddddd"
LONGEST = 24  # characters of a token that are drawn
# Formulas, boxes for everything, and colour bitmaps.
_NOT_FOR_TEXT = ("cm", "STIX", "Last Resort", "Noto Color")
_PACKAGES = ("fontpkg-", "matplotlib-fontja")


class Picture(Figure):
    """Figure that belongs to no pyplot: freed with its last reference, drawn without a screen."""

    def __init__(self) -> None:
        super().__init__(figsize=(10, 10), dpi=110, facecolor="white", layout="constrained")
        FigureCanvasAgg(self)  # measures text; saving picks a canvas of its own

    def _repr_png_(self) -> bytes:
        """Returns the picture that IPython shows, with or without its inline backend."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", facecolor="white", bbox_inches="tight", pad_inches=0.08)
        return buffer.getvalue()


@dataclass(frozen=True)
class Label:
    """Text to draw, and its font families."""

    text: str
    families: tuple[str, ...]

    @property
    def style(self) -> dict[str, Any]:
        """Text properties for matplotlib; a dollar sign begins no formula."""
        return {"family": list(self.families), "parse_math": False}


def labels(tokens: Sequence[str]) -> list[Label]:
    """Returns tokens as labels: blanks and line breaks are visible, long tokens are cut."""
    return [label(_readable(token), LONGEST) for token in tokens]


def label(text: str, longest: int | None = None) -> Label:
    """Returns a text as a label, of at most ``longest`` characters."""
    base = (*cast(Any, matplotlib.rcParams)["font.family"], "DejaVu Sans")
    known = set("\n").union(*map(_letters, base))
    found = {char: _family_of(char) for char in text if char not in known}
    written = "".join(char if found.get(char, char) else _spelled(char) for char in text)
    if longest is not None and len(written) > longest:
        written = written[: longest - 1].rstrip() + "…"
    # A script's own font goes first, so that its words are not split between two fonts.
    extra = [family for char in written if (family := found.get(char))]
    return Label(written, tuple(dict.fromkeys([*extra, *base])))


def _readable(token: str) -> str:
    if token and not token.strip(" \u3000\xa0"):
        return "␣" * len(token)
    return token.translate({0x0A: "↵", 0x0D: "↵", 0x09: "⇥"})


def _spelled(char: str) -> str:
    """Returns the U+ code of a letter; nothing for joiners and variation selectors."""
    name = unicodedata.name(char, "unnamed")
    if unicodedata.category(char) == "Cf" or name.startswith("VARIATION SELECTOR"):
        return ""
    _warn_once(name.split()[0])
    return f"U+{ord(char):04X}"


@cache
def _warn_once(script: str) -> None:
    warnings.warn(
        f"no font on this machine has some {script} characters, which are drawn as U+ codes; install one: "
        "pip install fontpkg-noto-sans-devanagari (Hindi) or matplotlib-fontja (Japanese), "
        "apt-get install fonts-noto (most scripts).",
        GlyphWarning,
        stacklevel=2,
    )


def _letters(family: str) -> frozenset[str]:
    """Returns the characters of the font that matplotlib takes for a family."""
    return _charmap(font_manager.findfont(font_manager.FontProperties(family=[family])))


@cache
def _charmap(path: str) -> frozenset[str]:
    return frozenset(map(chr, font_manager.get_font(path).get_charmap()))


@cache
def _family_of(char: str) -> str | None:
    """Returns the first family of this machine that has a character."""
    return next((font.name for font in _fonts() if char in _charmap(font.fname)), None)


@cache
def _fonts() -> list[font_manager.FontEntry]:
    """Returns the fonts of Python packages, then all of the machine, which matplotlib's own list may lack."""
    packaged = _packaged_fonts()
    manager = font_manager.fontManager
    listed = {font.fname for font in manager.ttflist}
    for path in [*packaged, *font_manager.findSystemFonts()]:
        if path not in listed:
            with contextlib.suppress(Exception):  # matplotlib skips what it cannot read, too
                manager.addfont(path)
    fonts = [font for font in manager.ttflist if not font.name.startswith(_NOT_FOR_TEXT)]
    order = lambda f: (f.fname not in packaged, "Sans" not in f.name, f.style, f.name)  # noqa: E731
    return sorted(fonts, key=order)


def _packaged_fonts() -> list[str]:
    return [
        str(file.locate())
        for package in distributions()
        if (package.name or "").lower().startswith(_PACKAGES)
        for file in package.files or ()
        if file.suffix in (".ttf", ".otf", ".ttc")
    ]
