"""Packages and zip files that are damaged, or made to take all memory: refused, never misread."""

import bz2
import gzip
import lzma
import random
import struct
import tarfile
import tracemalloc
import zipfile

import pytest

from crossattn.data import archives
from crossattn.data.errors import DataUnavailable

from .conftest import ar_of, tar_of, write_deb

FILES = {f"usr/share/page{i}.html": f"page {i}: " + "some text, " * i for i in range(6)}
FILES["usr/share/" + "long/" * 30 + "name.html"] = "a name of more than a hundred bytes"


def read(path):
    return dict(archives.read_deb(path, "usr/share/", ".html"))


def content(files=FILES):
    return {name.removeprefix("usr/share/"): text.encode() for name, text in files.items()}


@pytest.mark.parametrize("kind", ["xz", "gz", "bz2"])
def test_a_package_is_read_however_it_is_compressed(tmp_path, kind):
    write_deb(tmp_path / "x_1.deb", FILES, kind)
    assert read(tmp_path / "x_1.deb") == content()


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2"])
def test_no_flipped_bit_gives_another_text(tmp_path, kind):
    path = tmp_path / "x_1.deb"
    write_deb(path, FILES, kind)
    whole, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(60):
        place = rng.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert read(path) == content(), place
        except DataUnavailable as error:
            assert "x_1.deb cannot be read (" in str(error)
            refused += 1
    assert refused > 30


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2"])
def test_no_package_cut_short_is_read(tmp_path, kind):
    path = tmp_path / "x_1.deb"
    write_deb(path, FILES, kind)
    whole = path.read_bytes()
    for end in range(0, len(whole) - 1, max(len(whole) // 60, 1)):
        path.write_bytes(whole[:end])
        with pytest.raises(DataUnavailable, match="cannot be read"):
            read(path)


@pytest.mark.parametrize(
    "size",
    [b"-60       ", b"-1        ", b"9999999999", b"1e3       ", b"          ", b"\xb2         "],
)
def test_a_member_of_an_impossible_size_ends_the_reading(tmp_path, size):
    path = tmp_path / "x_1.deb"
    write_deb(path, FILES)
    raw = path.read_bytes()
    path.write_bytes(raw[:56] + size + raw[66:])
    with pytest.raises(DataUnavailable, match="cannot be read"):
        read(path)


def bomb(kind, size):
    """So many zeros as the content of a file in a tar."""
    head = tarfile.TarInfo("./usr/share/a.html")
    head.size = size
    pack = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lambda raw: lzma.compress(raw, preset=0),
    }
    return pack[kind](head.tobuf(tarfile.GNU_FORMAT) + bytes(size + 1024))


@pytest.mark.parametrize("kind", ["gz", "xz", "bz2"])
def test_a_small_package_that_unpacks_to_much_is_refused_in_little_memory(
    tmp_path, kind, monkeypatch
):
    monkeypatch.setattr(archives, "_ALWAYS", 2**21)
    path = tmp_path / "x_1.deb"
    members = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", tar_of({"./control": b""}, "gz")),
        (f"data.tar.{kind}", bomb(kind, 2**25)),
    ]
    path.write_bytes(ar_of(members))
    tracemalloc.start()
    with pytest.raises(
        DataUnavailable, match=r"unpacks to more than \d+ MiB, at which reading stops"
    ):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (FILES | {"usr/share/page9.html": ""}, r"lacks usr/share/page9\.html"),
        ({}, "it has no checksum of usr/share/page0.html"),
        (FILES | {"usr/share/page0.html": "x"}, "page0.html in it is not as its md5sums says"),
    ],
    ids=["missing", "unlisted", "other"],
)
def test_files_are_held_to_the_list_of_the_package(tmp_path, listed, said):
    write_deb(tmp_path / "x_1.deb", FILES, listed=listed)
    with pytest.raises(DataUnavailable, match=said):
        read(tmp_path / "x_1.deb")


def test_zstd_without_dpkg_is_named(tmp_path, monkeypatch):
    members = [("debian-binary", b"2.0\n"), ("control.tar.zst", b"x"), ("data.tar.zst", b"x")]
    (tmp_path / "x_1.deb").write_bytes(ar_of(members))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataUnavailable, match="zstd, and there is no dpkg-deb"):
        read(tmp_path / "x_1.deb")


def write_zip(path, raw=b"content", kind=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("a", raw)
    return path


def test_a_zip_file_is_read_and_no_flipped_bit_gives_another_content(tmp_path):
    raw = b"".join(b"line %d\n" % i for i in range(99))
    path = write_zip(tmp_path / "x.zip", raw)
    assert archives.read_zip(path, ["a"]) == [raw]
    whole = path.read_bytes()
    for place in range(0, len(whole) * 8, 11):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            assert archives.read_zip(path, ["a"]) == [raw], place
        except DataUnavailable as error:
            assert "x.zip cannot be read (" in str(error)


@pytest.mark.parametrize(
    ("kind", "named"), [(zipfile.ZIP_LZMA, "lzma"), (zipfile.ZIP_BZIP2, "bzip2")]
)
def test_unusual_compression_is_refused_by_name(tmp_path, kind, named):
    path = write_zip(tmp_path / "x.zip", kind=kind)
    with pytest.raises(
        DataUnavailable, match=f"a in it is compressed by {named}; expected deflate"
    ):
        archives.read_zip(path, ["a"])


def test_unknown_compression_and_encryption_are_refused_by_name(tmp_path):
    raw = write_zip(tmp_path / "x.zip", kind=zipfile.ZIP_STORED).read_bytes()
    place = raw.index(b"PK\x01\x02")
    for offset, value, said in ((8, 1, "is encrypted"), (10, 77, "compressed by 77")):
        changed = raw[: place + offset] + struct.pack("<H", value) + raw[place + offset + 2 :]
        (tmp_path / "x.zip").write_bytes(changed)
        with pytest.raises(DataUnavailable, match=f"a in it .*{said}"):
            archives.read_zip(tmp_path / "x.zip", ["a"])


def test_a_large_member_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "_ALWAYS", 2**21)
    path = write_zip(tmp_path / "x.zip", bytes(2**24))
    with pytest.raises(
        DataUnavailable, match="a unpacks to more than 3 MiB, at which reading stops"
    ):
        archives.read_zip(path, ["a"])
    stored = write_zip(tmp_path / "y.zip", bytes(2**22), zipfile.ZIP_STORED)
    with pytest.raises(DataUnavailable, match="a unpacks to more than 1 MiB"):
        list(archives.zip_pieces(stored, "a", limit=2**20))


def test_a_member_that_lies_about_its_size_takes_no_memory(tmp_path):
    path = write_zip(tmp_path / "x.zip", bytes(2**25))
    raw = path.read_bytes()
    path.write_bytes(raw.replace(struct.pack("<I", 2**25), struct.pack("<I", 1000)))
    tracemalloc.start()
    with pytest.raises(DataUnavailable, match=r"cannot be read \(Bad CRC-32"):
        archives.read_zip(path, ["a"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23


def test_pieces_are_small_and_add_up(tmp_path):
    raw = bytes(range(256)) * 2**12
    pieces = list(archives.zip_pieces(write_zip(tmp_path / "x.zip", raw), "a"))
    assert b"".join(pieces) == raw
    assert max(map(len, pieces)) <= 2**18


def test_compressed_data_are_held_to_their_end_and_a_limit():
    packed = gzip.compress(b"text")
    assert archives.gunzip(packed, 9) == b"text"
    for wrong, limit, said in (
        (packed + b"x", 9, "damaged"),
        (packed[:-1], 9, "damaged"),
        (packed, 3, "unpacks to more"),
    ):
        with pytest.raises(archives.Damaged, match=said):
            archives.gunzip(wrong, limit)
