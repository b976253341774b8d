"""Characters nobody can draw: which script they are, what to install, how to spell them.

Unicode only, no matplotlib.
"""

import unicodedata
from collections.abc import Collection

LONGEST = 24  # characters of a token that are drawn

DEVANAGARI = "pip install fontpkg-noto-sans-devanagari, or apt-get install fonts-lohit-deva"
JAPANESE = "pip install matplotlib-fontja, or apt-get install fonts-noto-cjk"
CJK = "apt-get install fonts-noto-cjk"
NOTO = "apt-get install fonts-noto-core"

# First words of Unicode names -> (script, what to install).
EAST_ASIAN = ("Chinese or Japanese", JAPANESE)
SCRIPTS = {
    "DEVANAGARI": ("Devanagari", DEVANAGARI),
    "HIRAGANA": EAST_ASIAN,
    "KATAKANA": EAST_ASIAN,
    "KATAKANA-HIRAGANA": EAST_ASIAN,
    "FULLWIDTH": EAST_ASIAN,
    "HALFWIDTH": EAST_ASIAN,
    "IDEOGRAPHIC": EAST_ASIAN,
    "CJK": EAST_ASIAN,
    "HANGUL": ("Korean", CJK),
    "BOPOMOFO": ("Bopomofo", CJK),
    "YI": ("Yi", CJK),
}


class GlyphWarning(UserWarning):
    """No font on this machine has some characters; they are drawn as their U+ codes."""


def script(char: str) -> tuple[str, str]:
    """Returns the name of a character's script and what to install to draw it."""
    category = unicodedata.category(char)
    if category == "Co":
        return "private-use", "install the font that defines them; no other can"
    if category == "Cs":
        return "surrogate", "decode the bytes as UTF-8; half characters have no shape"
    if category[0] == "S" and ord(char) >= 0x1F000:
        return "emoji", "apt-get install fonts-symbola"
    name = unicodedata.name(char, "")
    if not name:
        return "unnamed", "apt-get install fonts-unifont"
    first = name.split()[0]
    known = SCRIPTS.get(first)
    if known:
        return known
    if category[0] == "L":
        words = name.split(" LETTER")[0].split(" SYLLABLE")[0].split(" SIGN")[0].split()
        words = [w for w in words if w not in {"CAPITAL", "SMALL", "MODIFIER"}][:2]
        return " ".join(words).title(), f"{NOTO}, or fonts-noto-extra for rare scripts"
    return "symbol", "apt-get install fonts-symbola"


def readable(token: str) -> str:
    """Returns the token with its blanks and line breaks made visible."""
    if token and not token.strip(" \u3000\xa0"):
        return "␣" * len(token)
    return token.translate({0x0A: "↵", 0x0D: "↵", 0x09: "⇥"})


def shortened(text: str) -> str:
    """Returns at most LONGEST characters, the last an ellipsis when something was cut."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rstrip() + "…"


def ignorable(char: str) -> bool:
    """True for what has no shape of its own: joiners, direction marks, variation selectors."""
    code = ord(char)
    return (
        unicodedata.category(char) == "Cf" or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF
    )


def spelled(text: str, missing: Collection[str]) -> str:
    """Returns the text with every run of missing characters as `U+0938 0940`."""
    parts: list[str] = []
    inside = False
    for char in text:
        if char not in missing:
            parts.append(char)
            inside = False
        elif not ignorable(char):
            parts.append(f"{' ' if inside else 'U+'}{ord(char):04X}")
            inside = True
    return "".join(parts)
