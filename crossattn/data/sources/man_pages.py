"""Manual pages of Debian packages: a description, and the NAME line that sums it up.

The source is the text of DESCRIPTION, the target the page's line "accept, accept4 - accept a connection on a
socket". The program mandoc reads the pages, of whichever macros; what it sets in tables and listings is left
out. Pages of the same name, of the same words after the dash or of the same description are in one split, so
Linux' `accept` is where FreeBSD's is; those on one subject may be in two, as `sin` and `cos` are.
"""

import functools
import html
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from crossattn.data import archives, fetch
from crossattn.data.errors import DataUnavailable, absent
from crossattn.data.families import families
from crossattn.data.sources import Example, hashed_split

FORM = "man_pages"
_PACKAGES = [
    *("manpages", "manpages-dev", "freebsd-manpages", "erlang-manpages", "perl-doc", "git-man"),
    *("tcl8.6-doc", "tk8.6-doc", "ncurses-doc"),
    *("libssl-doc", "libcurl4-doc", "libx11-doc", "openmpi-doc"),
]
_PREFIX = "usr/share/man/"
_ENGLISH = re.compile(r"man\d/[^/]+\.gz")
_AT_ONCE = 500  # pages that one process of mandoc reads; their HTML is some 10 MB

_PAGE = '<table class="head">'
_SECTION = re.compile(r'<h1 class="Sh"[^>]*>')
_SET = re.compile(r"<(pre|table|math)\b.*?</\1>", re.DOTALL)
_BREAK = re.compile(r"</?(?:p|div|br|dl|dt|dd|ul|ol|li|section|h2)\b[^>]*>")
_TAG = re.compile(r"<[^>]*>")
_DASH = re.compile(r" [-–—] ")


def open_split(rest: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns examples {"id", "source", "target", "family"}."""
    pages = _pages(data_dir)
    of = families([[*_keys(page["target"]), page["source"]] for page in pages])
    return [
        page | {"family": family}
        for page, family in zip(pages, of, strict=True)
        if hashed_split(family, test=10, validation=10) == split
    ]


def _keys(line: str) -> list[str]:
    """Returns the names of a NAME line, and what it says of them."""
    names, says = line.lower().split(" - ", 1)
    return [*filter(None, map(str.strip, names.split(","))), f"- {says}"]


@functools.lru_cache(maxsize=1)
def _pages(data_dir: Any) -> Sequence[Example]:
    packages = fetch.debian_packages(_PACKAGES, data_dir)
    texts = {}
    for package in packages:
        for file, content in archives.read_deb(package, _PREFIX, ".gz"):
            if _ENGLISH.fullmatch(file):
                name = file.partition("/")[2].removesuffix(".gz")
                text = archives.gunzip(content)
                if not text.startswith(b".so "):  # which only includes another page
                    texts[name] = text
    if not texts:
        names = ", ".join(package.name for package in packages)
        raise absent([f"{_PACKAGES[0]}_*.deb"], packages[0].parent, f"{names} have no pages")
    names = sorted(texts)
    read = map(read_page, as_html([texts[name] for name in names], data_dir))
    return [
        {"id": name, "source": page[1], "target": page[0]}
        for name, page in zip(names, read, strict=True)
        if page is not None
    ]


def as_html(pages: Sequence[bytes], data_dir: Any = None) -> Iterator[str]:
    """Yields the HTML that mandoc makes of each manual page.

    Raises:
      DataUnavailable: mandoc is not installed and apt cannot bring it, or it fails.
    """
    program, environment = fetch.debian_program("mandoc", data_dir)
    for first in range(0, len(pages), _AT_ONCE):
        some = pages[first : first + _AT_ONCE]
        with tempfile.TemporaryDirectory() as folder:
            # Names that no page includes.
            names = [f"page-{number}" for number in range(len(some))]
            for name, page in zip(names, some, strict=True):
                (Path(folder) / name).write_bytes(page)
            done = subprocess.run(
                [program, "-T", "html", "-O", "fragment", *names],
                cwd=folder,
                env=environment,
                capture_output=True,
            )
        made = done.stdout.decode("utf-8", "replace").split(_PAGE)[1:]
        if done.returncode or len(made) != len(some):
            said = " ".join(done.stderr.decode("utf-8", "replace").split()) or "it says nothing"
            raise DataUnavailable(
                f"mandoc made {len(made)} pages of {len(some)} ({said[:200]}); expected Debian's mandoc 1.14"
            )
        yield from (_PAGE + page for page in made)


def read_page(page: str) -> tuple[str, str] | None:
    """Returns the NAME line and the text of DESCRIPTION in a page's HTML; None where it lacks one."""
    sections: dict[str, list[str]] = {}
    for section in _SECTION.split(page)[1:]:
        title, _, body = section.partition("</h1>")
        sections.setdefault(_text(title), []).append(body)
    name, says = (_text(" ".join(sections.get(title, []))) for title in ("NAME", "DESCRIPTION"))
    name = _DASH.sub(" - ", name, count=1)
    return (name, says) if " - " in name and says else None


def _text(markup: str) -> str:
    """Returns the words of HTML, without what is set in tables, listings and formulas."""
    plain = _TAG.sub("", _BREAK.sub(" ", _SET.sub(" ", markup)))
    return " ".join(html.unescape(plain).split())
