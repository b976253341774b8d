"""Manual pages of Debian's `manpages` and `manpages-dev`: a description, and the NAME line that sums it up.

The source is the text of DESCRIPTION, whose first paragraph begins with the lead, the target the page's line
"accept, accept4 - accept a connection on a socket". Pages are split by the hash of their name, section and
all; one that only includes another (`.so`) or has another form is left out. Pages on one subject stand on
both sides, as `sin` and `cos` do.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from crossattn.data import archives, fetch
from crossattn.data.errors import absent
from crossattn.data.sources import Example, hashed_split

FORM = "man_pages"
_PACKAGES = ["manpages", "manpages-dev"]
_PREFIX = "usr/share/man/"
_ENGLISH = re.compile(r"man\d/[^/]+\.gz")

# Macros whose arguments are text in one typeface, or in two that alternate without blanks.
_ONE_FACE = {"B", "I", "SM", "SB", "SS", "SH"}
_TWO_FACES = {"BR", "IR", "RB", "BI", "IB", "RI"}
_TABLES = {"TS": "TE", "EQ": "EN"}
_CHARACTERS = {
    "-": "-",
    "hy": "-",
    "en": "–",
    "em": "—",
    "bu": "•",
    "aq": "'",
    "oq": "‘",
    "cq": "’",
    "lq": "“",
    "rq": "”",
    "dq": '"',
    "rs": "\\",
    "ha": "^",
    "ti": "~",
    "ga": "`",
    "co": "©",
    "+-": "±",
    "mu": "×",
    "->": "→",
    "<=": "≤",
    ">=": "≥",
    "!=": "≠",
    "pi": "π",
    "if": "∞",
    "sr": "√",
    "*p": "π",
    "r!": "¡",
    "Po": "£",
    "Eu": "€",
    "sc": "§",
}
_ESCAPE = re.compile(
    r"\\(?:f(?:\[[^\]]*\]|\(..|.)|s[-+]?\d+|\((..)|\[([^\]]*)\]|([-e&|^0 c%/,~'`:)])|\*\S)"
)
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')


def open_split(rest: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns examples {"id", "source", "target"}."""
    return [page for page in _pages(data_dir) if split_of(page["id"]) == split]


def split_of(page: str) -> str:
    """Returns the split of a page, "accept.2": 10 % test, 10 % validation."""
    return hashed_split(page, test=10, validation=10)


@functools.lru_cache(maxsize=1)
def _pages(data_dir: Any) -> Sequence[Example]:
    packages = fetch.debian_packages(_PACKAGES, data_dir)
    found: dict[str, Example] = {}
    for package in packages:
        for file, content in archives.read_deb(package, _PREFIX, ".gz"):
            if _ENGLISH.fullmatch(file):
                name = file.partition("/")[2].removesuffix(".gz")
                page = read_page(archives.gunzip(content).decode("utf-8", "replace"))
                if page is not None:
                    found[name] = {"id": name, "source": page[1], "target": page[0]}
    if not found:
        names = " and ".join(package.name for package in packages)
        raise absent([f"{_PACKAGES[0]}_*.deb"], packages[0].parent, f"{names} have no pages")
    return [found[name] for name in sorted(found)]


def read_page(text: str) -> tuple[str, str] | None:
    """Returns the NAME line and the text of DESCRIPTION; None where a page has none of that form."""
    sections: dict[str, list[str]] = {}
    for title, paragraph in _paragraphs(text):
        sections.setdefault(title, []).append(paragraph)
    name = " ".join(sections.get("NAME", []))
    description = " ".join(sections.get("DESCRIPTION", []))
    return (name, description) if " - " in name and description else None


def _paragraphs(text: str) -> Iterator[tuple[str, str]]:
    """Yields (section, paragraph) of a page; tables, programs and comments are left out."""
    section, words, until = "", [], ""
    for line in text.splitlines():
        name, _, given = line[1:].partition(" ") if line[:1] in (".", "'") else ("", "", line)
        name = name.strip()
        if until:
            until = "" if name == until else until
            continue
        if name.startswith('\\"') or (not name and line[:1] in (".", "'")):
            continue
        if name in _TABLES or name in ("nf", "EX"):
            until = _TABLES.get(name, "fi" if name == "nf" else "EE")
        elif name in ("SH", "SS", "PP", "P", "LP", "TP", "TQ", "IP", "HP"):
            if words:
                yield section, " ".join(words)
            words = []
            if name == "SH":
                section = " ".join(_arguments(given)).strip()
            elif name == "SS":
                words = [*_arguments(given), ":"]
        elif name in _ONE_FACE:
            words.append(" ".join(_arguments(given)))
        elif name in _TWO_FACES:
            words.append("".join(_arguments(given)))
        elif name in ("UR", "MT") or not name:
            words.append(_plain(given))
        words = [word for word in (" ".join(word.split()) for word in words) if word]
    if words:
        yield section, " ".join(words)


def _arguments(given: str) -> list[str]:
    """Returns the arguments of a macro: words, or quoted texts in which "" is a quote."""
    given = given.partition(' \\"')[0]
    return [
        _plain(match[1].replace('""', '"') if match[2] is None else match[2])
        for match in _ARGUMENT.finditer(given)
    ]


def _plain(text: str) -> str:
    """Returns a text without escapes of typefaces, and characters in place of their names."""
    text = text.partition('\\"')[0]

    def character(match: re.Match) -> str:
        name = match[1] or match[2] or match[3]
        return {"e": "\\", "0": " ", " ": " ", "~": " "}.get(name) or _CHARACTERS.get(name, "")

    return _ESCAPE.sub(character, text)
