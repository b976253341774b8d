"""Manual pages become texts without markup, and pages on one thing are in one split."""

import gzip
import shutil
from pathlib import Path

import pytest

from crossattn.data import fetch, sources
from crossattn.data.errors import DataUnavailable
from crossattn.data.sources import man_pages
from tests.data.conftest import write_deb

# A page in the macros of Linux, in those of BSD, and what mandoc 1.14.6 makes of the second.
LINUX = r""".\" A comment about nothing
.TH {0} 2 2022-12-04 "Linux"
.SH NAME
{0}, {0}4 \- accept a \fBconnection\fP on a socket
.SH SYNOPSIS
.nf
int {0}(int sockfd);
.fi
.SH DESCRIPTION
The
.BR {0} ()
call takes
.IR "a socket" ,
.\" hidden
as in
.BR listen (2).
It\(aqs \[bu] 3\~bytes, \en and "quoted".
.TS
l l.
a	table
.TE
.PP
.EX
a program
.EE
Then it ends.
.SH "RETURN VALUE"
None.
"""
BSD = """.Dd August 18, 2016
.Dt {0} 2
.Os
.Sh NAME
.Nm {0}
.Nd accept a connection on a socket
.Sh DESCRIPTION
The
.Nm
system call takes a socket,
as in
.Xr listen 2 .
.Bd -literal
a program
.Ed
.Bl -tag -width x
.It Va first
One & <two>.
.El
.Sh ERRORS
None.
"""
HTML = """<table class="head">
  <tr>
    <td class="head-ltitle">{0}(2)</td>
    <td class="head-vol">System Calls Manual</td>
    <td class="head-rtitle">{0}(2)</td>
  </tr>
</table>
<div class="manual-text">
<section class="Sh">
<h1 class="Sh" id="NAME"><a class="permalink" href="#NAME">NAME</a></h1>
<p class="Pp"><code class="Nm">{0}</code> &#x2014; <span class="Nd">accept a
    connection on a socket</span></p>
</section>
<section class="Sh">
<h1 class="Sh" id="DESCRIPTION"><a class="permalink" href="#DESCRIPTION">DESCRIPTION</a></h1>
<p class="Pp">The <code class="Nm">{0}</code> system call takes a socket, as in
    <a class="Xr">listen(2)</a>.</p>
<div class="Bd Pp Li">
<pre>a program</pre>
</div>
<dl class="Bl-tag">
  <dt id="first"><var class="Va">first</var></dt>
  <dd>One &amp; &lt;two&gt;.</dd>
</dl>
</section>
<section class="Sh">
<h1 class="Sh" id="ERRORS"><a class="permalink" href="#ERRORS">ERRORS</a></h1>
<p class="Pp">None.</p>
</section>
</div>
"""
READ = (
    "accept - accept a connection on a socket",
    "The accept system call takes a socket, as in listen(2). first One & <two>.",
)
NAMES = [f"call{a}{b}" for a in "abcdefgh" for b in "klmnop"]


def _page(name, says):
    return HTML.replace("{0}", name).replace("accept a\n    connection on a socket", says)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with the packages, whose pages are HTML already: each call, and FreeBSD's page of it."""
    files = {
        f"usr/share/man/man2/{name}.2{of}.gz": _page(name, f"{says} {name}")
        for name in NAMES
        for of, says in (("", "do"), ("freebsd", "perform"))
    }
    files["usr/share/man/man2/other.2.gz"] = ".so man2/callak.2\n"
    files["usr/share/man/man2/empty.2.gz"] = HTML.replace("DESCRIPTION", "NOTES")
    files["usr/share/man/fr/man2/callak.2.gz"] = _page("appel", "appeler")
    files = {name: gzip.compress(text.encode()) for name, text in files.items()}
    downloads = fetch.downloads_dir(tmp_path)
    for package in man_pages._PACKAGES:
        write_deb(downloads / f"{package}_6-1_all.deb", {"usr/share/doc/x": "no page"})
    write_deb(downloads / "manpages_6-1_all.deb", files)

    def as_html(pages, _):
        assert not any(b".so" in page for page in pages), "mandoc would look for another page"
        return [page.decode() for page in pages]

    monkeypatch.setattr(man_pages, "as_html", as_html)
    man_pages._pages.cache_clear()
    yield tmp_path
    man_pages._pages.cache_clear()


def test_every_page_with_a_description_is_in_one_split_with_those_on_the_same_thing(folder):
    opened = {
        split: sources.open_source("man_pages", split, data_dir=folder) for split in sources.SPLITS
    }
    assert all(opened.values())
    ids = [page["id"] for split in opened.values() for page in split]
    assert sorted(ids) == sorted(f"{name}.2{of}" for name in NAMES for of in ("", "freebsd"))
    for pages in opened.values():
        found = {page["id"] for page in pages}
        assert {x.removesuffix("freebsd") for x in found} <= found


def test_pages_that_share_a_name_or_a_text_are_in_one_split(monkeypatch):
    lines = [f"x{i} - read It {i}" for i in range(40)]
    lines += [f"y{i},, z{i} - read it {i}" for i in range(40)]
    lines += [f"Z{i} - another {i}" for i in range(40)]
    lines += [f"w{i} - a fourth {i}" for i in range(40)]
    texts = [str(i) for i in range(120)] + [str(80 + i) for i in range(40)]
    pages = [
        {"id": str(i), "source": text, "target": line}
        for i, (line, text) in enumerate(zip(lines, texts, strict=True))
    ]
    monkeypatch.setattr(man_pages, "_pages", lambda data_dir: pages)
    for split in sources.SPLITS:
        own = man_pages.open_split("", split)
        found = {int(page["id"]) for page in own}
        assert len({page["family"] for page in own}) == len({int(page["id"]) % 40 for page in own})
        assert found and {i % 40 + 40 * k for i in found for k in range(4)} == found


def test_a_page_is_its_name_line_and_its_description_without_markup():
    assert man_pages.read_page(HTML.replace("{0}", "accept")) == READ


@pytest.mark.parametrize(
    "page",
    ["", "<p>no page</p>", HTML.replace("&#x2014;", ":"), HTML.replace("DESCRIPTION", "NOTES")],
)
def test_a_page_of_another_form_is_left_out(page):
    assert man_pages.read_page(page) is None


def _mandoc():
    return shutil.which("mandoc") or (fetch.cache_dir() / "programs" / "mandoc").is_dir()


@pytest.mark.skipif(not _mandoc(), reason="mandoc is not installed, and was not fetched")
def test_mandoc_reads_the_macros_of_linux_and_of_bsd(monkeypatch):
    monkeypatch.setattr(man_pages, "_AT_ONCE", 2)  # so three pages take two processes
    pages = [text.replace("{0}", "accept").encode() for text in (LINUX, BSD, LINUX)]
    linux, bsd, last = map(man_pages.read_page, man_pages.as_html(pages))
    assert bsd == READ
    assert linux == last == (
        "accept, accept4 - accept a connection on a socket",
        'The accept() call takes a socket, as in listen(2). It\'s • 3 bytes, \\n and "quoted".'
        " Then it ends.",
    )  # fmt: skip


@pytest.mark.parametrize("says", ["echo broken >&2; exit 3", "echo '<p>another form</p>'"])
def test_a_mandoc_that_fails_is_one_line(tmp_path, monkeypatch, says):
    program = Path(tmp_path, "mandoc")
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o700)
    monkeypatch.setattr(fetch, "debian_program", lambda *_: (program, {}))
    with pytest.raises(DataUnavailable, match="mandoc made 0 pages of 1") as refused:
        list(man_pages.as_html([LINUX.encode()]))
    assert "\n" not in str(refused.value)


def test_packages_without_pages_are_one_line(folder):
    write_deb(fetch.downloads_dir(folder) / "manpages_6-1_all.deb", {"usr/share/doc/x": "no"})
    with pytest.raises(DataUnavailable, match="have no pages") as refused:
        sources.open_source("man_pages", "test", data_dir=folder)
    assert "\n" not in str(refused.value)
