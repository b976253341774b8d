"""Miniature packages with the structure of the real ones, so that no test needs a network."""

import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

PAGE = '<html><body><div class="x"><p id="bm_system">menu</p></div><div id="DisplayArea">{}</div>'


def write_deb(
    path: Path, files: dict[str, Any], kind: str = "xz", listed: dict[str, Any] | None = None
) -> None:
    """A Debian package: an `ar` archive with a tar of files and one of what is said about them.

    `listed` are the files that its checksums are of, if not its own.
    """
    contents = {f"./{name}": _raw(content) for name, content in files.items()}
    sums = "".join(
        f"{hashlib.md5(_raw(content)).hexdigest()}  {name}\n"
        for name, content in (files if listed is None else listed).items()
    )
    control = {"./control": b"Package: x\n", "./md5sums": sums.encode()}
    members = [
        ("debian-binary", b"2.0\n"),
        (f"control.tar.{kind}", tar_of(control, kind)),
        (f"data.tar.{kind}", tar_of(contents, kind)),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ar_of(members))


def _raw(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def tar_of(files: dict[str, bytes], kind: str) -> bytes:
    """A tar archive as dpkg writes it; `kind` is gz, xz or bz2."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{kind}", format=tarfile.GNU_FORMAT) as tar:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return buffer.getvalue()


def ar_of(members: list[tuple[str, bytes]]) -> bytes:
    """An `ar` archive."""
    out = b"!<arch>\n"
    for name, body in members:
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n"
        out += head.encode() + body + b"\n" * (len(body) % 2)
    return out


def help_pages(language: str, pages: dict[str, str]) -> dict[str, str]:
    """Files of a help package from the bodies of its pages."""
    folder = f"usr/share/libreoffice/help/{language}/text"
    return {f"{folder}/{name}": PAGE.format(body) for name, body in pages.items()}


@pytest.fixture
def help_packages(tmp_path):
    """A data folder with two help packages of 60 pages in its downloads."""
    english, french = {}, {}
    for i in range(60):
        name = f"swriter/page{i}.html"
        english[name] = f'<p id="par_id{i}">Click <span class="emph">OK</span> number {i}.</p>'
        french[name] = f'<p id="par_id{i}">Cliquez sur <b>OK</b> numéro {i}.</p>'
    downloads = tmp_path / "downloads"
    write_deb(downloads / "libreoffice-help-en-us_1-1_all.deb", help_pages("en-US", english))
    write_deb(downloads / "libreoffice-help-fr_1-1_all.deb", help_pages("fr", french))
    return tmp_path


@pytest.fixture
def greek_wheel(tmp_path, monkeypatch):
    """A data folder with a wheel of 40 verses; the builder's pin is set to its checksum."""
    greek = ["id\taltId\ttext\tstrongs"]
    english = ["id\tsource_verse\ttext\tskip_space_after\texclude"]
    records = []
    for verse in range(1, 41):
        v = f"40001{verse:03}"
        greek += [f"n{v}{w:03}\t-\t{text}\tG1" for w, text in enumerate(["λόγος", "ἦν", "θεοῦ"], 1)]
        rows = [
            ("The", "", ""),
            ("word", "", ""),
            ("was", "", ""),
            ("God’s", "y", ""),
            (".", "", "y"),
        ]
        english += [f"{v}{w:03}\t{v}\t{t}\t{s}\t{x}" for w, (t, s, x) in enumerate(rows, 1)]
        pairs = [([1], [1, 2]), ([2], [3]), ([3], [4])]
        for source, target in pairs:
            ids = {
                "source": [f"n{v}{i:03}" for i in source],
                "target": [f"{v}{i:03}" for i in target],
            }
            records.append(ids)
    # A link that leaves its verse, and a verse that only the Greek has.
    records.append({"source": ["n40001001001"], "target": ["40001002001"]})
    greek.append("n40001041001\t-\tμόνος\tG1")
    path = tmp_path / "downloads" / "bible_alignments-0.4.2-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/sources/SBLGNT.tsv", "\n".join(greek) + "\n")
        archive.writestr("data/eng/targets/BSB/nt_BSB.tsv", "\n".join(english) + "\n")
        name = "data/eng/alignments/BSB/SBLGNT-BSB-manual.json"
        archive.writestr(name, json.dumps({"records": records}))
    from crossattn.data.sources import greek_english

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(greek_english.GreekEnglish, "SHA256", digest)
    return tmp_path
