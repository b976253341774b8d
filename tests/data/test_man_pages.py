"""Manual pages become texts without macros, and each page is in one split."""

import gzip

import pytest

from crossattn.data import fetch, sources
from crossattn.data.errors import DataUnavailable
from crossattn.data.sources import man_pages
from tests.data.conftest import write_deb

PAGE = r""".\" A comment about nothing
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
a table
.TE
.PP
.EX
a program
.EE
Then it ends.
.SH "RETURN VALUE"
None.
"""
NAMES = [f"call{a}{b}" for a in "abcdefgh" for b in "klmnop"]


@pytest.fixture
def folder(tmp_path):
    """A data folder with the two packages."""
    files = {f"usr/share/man/man2/{name}.2.gz": PAGE.replace("{0}", name) for name in NAMES}
    files["usr/share/man/man2/other.2.gz"] = ".so man2/callak.2\n"
    files["usr/share/man/fr/man2/callak.2.gz"] = PAGE.replace("{0}", "appel")
    files = {name: gzip.compress(text.encode()) for name, text in files.items()}
    downloads = fetch.downloads_dir(tmp_path)
    write_deb(downloads / "manpages_6-1_all.deb", files)
    write_deb(downloads / "manpages-dev_6-1_all.deb", {"usr/share/doc/x": "no page"})
    man_pages._pages.cache_clear()
    yield tmp_path
    man_pages._pages.cache_clear()


def test_every_page_with_a_description_is_in_one_split(folder):
    opened = {
        split: sources.open_source("man_pages", split, data_dir=folder) for split in sources.SPLITS
    }
    assert all(opened.values())
    ids = [page["id"] for split in opened.values() for page in split]
    assert sorted(ids) == sorted(f"{name}.2" for name in NAMES)
    for split, pages in opened.items():
        assert {man_pages.split_of(page["id"]) for page in pages} == {split}


def test_a_page_is_its_name_line_and_its_description_without_macros():
    assert man_pages.read_page(PAGE.replace("{0}", "accept")) == (
        "accept, accept4 - accept a connection on a socket",
        'The accept() call takes a socket, as in listen(2). It\'s • 3 bytes, \\n and "quoted".'
        " Then it ends.",
    )


@pytest.mark.parametrize(
    "page",
    ["", ".so man2/x.2\n", PAGE.replace(r"\- ", ""), PAGE.replace("SH DESCRIPTION", "SH NOTES")],
)
def test_a_page_of_another_form_is_left_out(page):
    assert man_pages.read_page(page) is None


def test_packages_without_pages_are_one_line(folder):
    for name in ("manpages", "manpages-dev"):
        write_deb(fetch.downloads_dir(folder) / f"{name}_6-1_all.deb", {"usr/share/doc/x": "no"})
    with pytest.raises(DataUnavailable, match="have no pages") as refused:
        sources.open_source("man_pages", "test", data_dir=folder)
    assert "\n" not in str(refused.value)
