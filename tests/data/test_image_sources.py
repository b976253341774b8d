"""Sources of images: miniature packages, and the real ones where they were fetched before."""

import gzip
import hashlib
import io
import json
import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from crossattn.data import archives, fetch, sources
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.sources import emoji
from tests.peers import package

from .conftest import tar_of, write_deb

pillow = package("PIL.Image", "images")

PREFIX = "usr/share/datasets/fashion-mnist/"


def idx(array: np.ndarray) -> bytes:
    """The format of MNIST, as its page describes it."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(head + array.astype(np.uint8).tobytes())


def write_fashion(folder, changed=()):
    """A package of 24 training pictures and 5 test pictures; picture `i` is `i` everywhere."""
    files = {}
    for name, count in (("train", 24), ("t10k", 5)):
        pictures = np.broadcast_to(np.arange(count)[:, None, None], (count, 28, 28))
        files[f"{PREFIX}{name}-images-idx3-ubyte.gz"] = idx(pictures)
        files[f"{PREFIX}{name}-labels-idx1-ubyte.gz"] = idx(np.arange(count) % 10)
    files |= {PREFIX + name: content for name, content in dict(changed).items()}
    write_deb(folder / "downloads" / "dataset-fashion-mnist_1_all.deb", files, "gz")
    return folder


def test_fashion_pictures_come_with_their_labels_in_three_splits(tmp_path):
    found = {
        split: sources.open_source("fashion_mnist", split, data_dir=write_fashion(tmp_path))
        for split in sources.SPLITS
    }
    assert {name: len(split) for name, split in found.items()} == {
        "train": 22,
        "validation": 2,
        "test": 5,
    }
    classes = sources.classes_of("fashion_mnist")["label"]
    for split, first in (("train", 0), ("validation", 22), ("test", 0)):
        for i, example in enumerate(found[split], first):
            assert example["image"].shape == (28, 28) and example["image"].dtype == np.uint8
            assert (example["image"] == i).all() and example["label"] == classes[i % 10]
    assert found["validation"][0]["id"] == "train-22"


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"train-labels-idx1-ubyte.gz": idx(np.zeros(23))}, r"shapes \[24, 28, 28\] and \[23\]"),
        ({"train-labels-idx1-ubyte.gz": idx(np.full(24, 10))}, "train pictures and labels"),
        (
            {"train-images-idx3-ubyte.gz": gzip.compress(b"\0\0\x08\x03" + b"\0" * 99)},
            "no array of",
        ),
        ({"train-images-idx3-ubyte.gz": gzip.compress(b"junk")}, "no array of bytes"),
        ({"train-images-idx3-ubyte.gz": b"junk"}, "damaged"),
    ],
)
def test_a_package_with_wrong_pictures_is_named(tmp_path, changed, complaint):
    write_fashion(tmp_path, changed)
    with pytest.raises(DataUnavailable, match=complaint) as caught:
        sources.open_source("fashion_mnist", data_dir=tmp_path)
    assert "put dataset-fashion-mnist_*.deb in" in str(caught.value)
    assert "\n" not in str(caught.value)


def write_tgz(path, files: dict[str, bytes]) -> str:
    """An npm package; its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_of({f"package/{name}": raw for name, raw in files.items()}, "gz"))
    return hashlib.sha256(path.read_bytes()).hexdigest()


CODES = [
    "1F468-200D-2695-FE0F",
    "1F469-1F3FB-200D-2695-FE0F",
    "1F9D1-200D-2695-FE0F",
    *(f"{0x1F400 + i:X}" for i in range(60)),
]


@pytest.fixture
def emoji_packages(tmp_path, monkeypatch):
    """A data folder with packages of 63 emoji; one more has an image alone, and one a caption alone."""
    images = {}
    for i, code in enumerate([*CODES, "1F680"]):
        buffer = io.BytesIO()
        picture = pillow.new("RGBA", (64, 64), (i, 0, 0, 255))
        for bit in range(6):  # so that no two are alike
            green = (i >> bit & 1) * 255
            picture.paste((0, green, 0, 255), (20, 10 * bit, 28, 10 * bit + 8))
        picture.save(buffer, "PNG")
        images[f"img/twitter/64/{code.lower()}.png"] = buffer.getvalue()
        images[f"img/twitter/sheets/{code.lower()}.png"] = b"another size"
    files = {}
    for language in emoji.LANGUAGES:
        rows = [
            {"hexcode": code, "label": f"{language} {code}", "group": 1 if i < 3 else 3}
            for i, code in enumerate([*CODES, "1F6FF"])
        ]
        rows[0]["skins"] = [rows.pop(1)]
        files[f"{language}/data.json"] = json.dumps(rows).encode()
        files[f"{language}/compact.json"] = b"another format"
    folder = tmp_path / "downloads"
    sums = [
        write_tgz(folder / "emoji-datasource-twitter-16.0.0.tgz", images),
        write_tgz(folder / "emojibase-data-17.0.0.tgz", files),
    ]
    monkeypatch.setattr(emoji.Emoji, "IMAGES_SHA256", sums[0])
    monkeypatch.setattr(emoji.Emoji, "CAPTIONS_SHA256", sums[1])
    return tmp_path


def test_emoji_come_with_their_captions_and_groups(emoji_packages):
    found = {}
    for split in sources.SPLITS:
        for example in sources.open_source("emoji/fr", split, data_dir=emoji_packages):
            assert emoji.split_of(example["family"]) == split
            found[example["id"]] = example
    assert set(found) == set(CODES)
    for i, code in enumerate(CODES):
        example = found[code]
        assert example["caption"] == f"fr {code}" and example["language"] == "fr"
        assert example["group"] == ("people-body" if i < 3 else "animals-nature")
        assert pillow.open(io.BytesIO(example["image"])).getpixel((5, 5))[0] == i


def test_families_with_the_same_picture_mirrored_or_not_are_one():
    random = np.random.default_rng(0)
    left, flag, other = (random.integers(0, 256, (64, 64, 4), np.uint8) for _ in range(3))
    again = np.clip(flag.astype(int) + random.integers(-3, 4, flag.shape), 0, 255).astype(np.uint8)
    pictures = {
        "1FAF2": left,
        "1FAF1": left[:, ::-1],
        "1F1FA": flag,
        "1F1F2": again,
        "1F680": other,
    }
    pictures["1FAF2-1F3FB"] = random.integers(0, 256, (64, 64, 4), np.uint8)  # a tone of the first
    examples = []
    for code, pixels in pictures.items():
        buffer = io.BytesIO()
        pillow.fromarray(pixels).save(buffer, "PNG")
        examples.append({"id": code, "image": buffer.getvalue()})
    found = dict(zip(pictures, emoji.families_of(examples), strict=True))
    assert found["1FAF2"] == found["1FAF1"] == found["1FAF2-1F3FB"] == "1FAF1"
    assert found["1F1FA"] == found["1F1F2"] == "1F1F2" and found["1F680"] == "1F680"


def test_several_languages_caption_every_emoji_each(emoji_packages):
    one = sources.open_source("emoji", data_dir=emoji_packages)
    both = sources.open_source("emoji/en,ja", data_dir=emoji_packages)
    assert len(both) == 2 * len(one) and one[0]["language"] == "en"
    assert Counter(each["language"] for each in both) == {"en": len(one), "ja": len(one)}
    assert len({each["id"] for each in both}) == len(both)
    assert both[len(one)]["image"] == one[0]["image"] and both[-1]["language"] == "ja"


def test_shapes_are_captioned_in_each_language_they_are_asked_for_in():
    one, both = (sources.open_source(name, "test") for name in ("shapes", "shapes/de,en"))
    assert len(both) == 2 * len(one) and [both[i]["language"] for i in range(4)] == ["de", "en"] * 2
    for i, example in enumerate(one):
        german, english = both[2 * i], both[2 * i + 1]
        assert english["caption"] == example["caption"]
        np.testing.assert_array_equal(german["image"], example["image"])
    said = {(both[i + 1]["caption"], both[i]["caption"]) for i in range(0, len(both), 2)}
    known = {"a red circle": "ein roter Kreis", "a green square": "ein grünes Quadrat",
             "a black cross": "ein schwarzes Kreuz", "something blue": "etwas blaues"}  # fmt: skip
    assert all(known.get(english, german) == german for english, german in said)
    assert len(known.keys() & {english for english, _ in said}) > 1
    with pytest.raises(DataError, match="captions in en and de; 'fr' was given"):
        sources.open_source("shapes/fr")


@pytest.mark.parametrize(
    "family",
    [
        "1F44B 1F44B-1F3FB 1F44B-1F3FF",
        "1F9D1-200D-2695-FE0F 1F468-1F3FD-200D-2695-FE0F 1F469-200D-2695-FE0F",
        "1F3C3 1F3C3-200D-2640-FE0F 1F3C3-1F3FF-200D-2642-FE0F-200D-27A1-FE0F 1F3C3-200D-27A1-FE0F",
        "1F46B 1F46C-1F3FB 1F469-1F3FB-200D-1F91D-200D-1F468-1F3FC",
        "1F46A 1F468-200D-1F469-200D-1F467-200D-1F466 1F9D1-200D-1F9D1-200D-1F9D2",
        "1F48F 1F469-1F3FE-200D-2764-FE0F-200D-1F48B-200D-1F468-1F3FB",
        "1F91D 1FAF1-1F3FB-200D-1FAF2-1F3FC",
        "1F385 1F936-1F3FB 1F9D1-1F3FB-200D-1F384",
    ],
)
def test_tones_and_genders_of_an_emoji_are_one_family(family):
    assert len({emoji.family_of(code) for code in family.split()}) == 1


def test_other_emoji_are_families_of_their_own():
    codes = [
        "1F468",
        "1F466",
        "1F474",
        "1F9D1-200D-2695-FE0F",
        "1F9D1-200D-1F33E",
        "1F3FB",
        "2640-FE0F",
    ]
    assert len({emoji.family_of(code) for code in codes}) == len(codes)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("emoji/xx", "no captions in 'xx'; expected some of bn, da"),
        ("emoji/en,en", "names a language twice"),
        ("emoji:en", "expected emoji/LANGUAGE"),
        ("fashion_mnist/en", "no data source 'fashion_mnist.en'; expected fashion_mnist"),
    ],
)
def test_a_bad_name_is_refused_before_anything_is_fetched(name, complaint, tmp_path):
    with pytest.raises(DataError, match=complaint):
        sources.open_source(name, data_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_images_are_not_exchanged_with_captions(emoji_packages):
    with pytest.raises(DataError, match="these examples hold id, image, caption"):
        sources.open_source("emoji", data_dir=emoji_packages, reverse=True)


def test_the_identity_of_images_follows_them(emoji_packages):
    known = sources.identity("emoji/en", data_dir=emoji_packages)
    assert known == sources.identity("emoji/en", data_dir=emoji_packages)
    assert known["sample"] != sources.identity("emoji/fr", data_dir=emoji_packages)["sample"]
    json.dumps(known)


def test_an_npm_package_is_fetched_and_pinned(tmp_path, monkeypatch):
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\nprintf body > some-data-1.0.0.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/usr/bin:/bin")
    with pytest.raises(DataUnavailable, match="not the pinned file"):
        fetch.npm_package("some-data", "1.0.0", "0" * 64, tmp_path)
    good = hashlib.sha256(b"body").hexdigest()
    path = fetch.npm_package("some-data", "1.0.0", good, tmp_path)
    assert path == tmp_path / "downloads" / "some-data-1.0.0.tgz"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetch.npm_package("some-data", "1.0.0", good, tmp_path) == path
    path.unlink()
    with pytest.raises(DataUnavailable, match=r"put some-data-1\.0\.0\.tgz in .*no npm here"):
        fetch.npm_package("some-data", "1.0.0", good, tmp_path)


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"junk" + raw])
def test_a_damaged_npm_package_is_named(tmp_path, damage):
    path = tmp_path / "a.tgz"
    write_tgz(path, {f"{i}.png": np.random.default_rng(i).bytes(5000) for i in range(9)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataUnavailable, match=r"put a\.tgz in .*cannot be read") as caught:
        list(archives.read_tgz(path, "package/"))
    assert "\n" not in str(caught.value)


def test_an_npm_package_that_unpacks_to_too_much_is_refused(tmp_path):
    path = tmp_path / "a.tgz"
    write_tgz(path, {"zeros": bytes(2**26 + 1)})
    with pytest.raises(DataUnavailable, match="unpacks to more than 64 MiB"):
        list(archives.read_tgz(path, "package/"))


# --- the real ones, where they were fetched before


def real(name: str, split: str):
    if not (fetch.cache_dir() / "tfds" / name.partition("/")[0]).is_dir():
        pytest.skip(f"not fetched yet: crossattn.data.sources.open_source({name!r})")
    return sources.open_source(name, split)


def test_real_fashion_is_as_it_was_published():
    found = {split: real("fashion_mnist", split) for split in sources.SPLITS}
    assert [len(split) for split in found.values()] == [55_000, 5_000, 10_000]
    # The first test pictures, by the publication's own list of classes.
    labels = [found["test"][i]["label"] for i in range(4)]
    assert labels == ["ankle boot", "pullover", "trouser", "trouser"]


def test_real_emoji_never_straddle():
    where, count = defaultdict(set), 0
    for split in sources.SPLITS:
        for example in real("emoji/en", split):
            count += 1
            bare = re.sub(r"\b(wo)?m[ae]n\b|\bpe(rson|ople)\b|facing right", "", example["caption"])
            bare = (
                " ".join(bare.split(":")[0].split()) if "tone" in bare else " ".join(bare.split())
            )
            if bare and bare != ":":
                where[bare].add(split)
    families = defaultdict(set)
    for split in sources.SPLITS:
        for example in real("emoji/en", split):
            families[example["family"]].add(split)
    assert all(len(splits) == 1 for splits in families.values()) and len(families) < 1690
    assert count == 3786 and [bare for bare, splits in where.items() if len(splits) > 1] == []
