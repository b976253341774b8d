"""Stamps: a miniature package, and the real one where it was fetched before."""

import io
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest

from crossattn.data import fetch, sources
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.families import families, small_picture
from crossattn.data.features import Image, Sound
from crossattn.data.sources import stamps
from tests.peers import package

from .conftest import write_deb

pillow = package("PIL.Image", "images")
soundfile = package("soundfile", "speech")

PREFIX = "usr/share/tuxpaint/stamps/"
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="30pt" height="15pt" viewBox="0 0 20 10">'
    '<rect width="10" height="10" fill="#ff0000"/></svg>'
)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    pillow.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def noise(seed: int) -> np.ndarray:
    """An opaque picture of 6 x 6 squares, unlike any other's."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    squares = small.repeat(8, 0).repeat(8, 1)
    return np.dstack([squares, np.full((48, 48), 255, np.uint8)])


def ogg(hertz: float, rate: int) -> bytes:
    buffer = io.BytesIO()
    times = np.arange(int(0.5 * rate)) / rate
    soundfile.write(buffer, 0.3 * np.sin(2 * np.pi * hertz * times), rate, format="OGG")
    return buffer.getvalue()


NAMES = [f"food/thing{chr(97 + i)}{chr(97 + j)}" for i in range(6) for j in range(6)]


def write_stamps(folder, changed=()):
    """Thirty-six stamps of food; the first is not written in French, and the second not spoken."""
    files = {}
    for i, name in enumerate(NAMES):
        french = "" if i == 0 else f"\nfr.utf8=Une  chose {name[-2:]}.\nqq.utf8=other"
        files[f"{name}.txt"] = f"A thing{name[-2:]}.{french}\n"
        files[f"{name}.png"] = png(noise(i))
        if i != 1:
            files[f"{name}_desc_fr.ogg"] = ogg(300 + 10 * i, 8000 if i % 2 else 44100)
        files[f"{name}_desc.ogg"] = b"English"
        files[f"{name}.ogg"] = b"the sound of the thing"
    files |= {"symbols/a.png": png(noise(99)), "symbols/a.txt": "A letter."}
    files |= {"food/lacks_a_picture.txt": "Nothing.", "food/lacks_a_caption.png": png(noise(98))}
    files |= dict(changed)
    listed = {PREFIX + name: content for name, content in files.items() if content is not None}
    write_deb(folder / "downloads" / "tuxpaint-stamps-default_1_all.deb", listed, "gz")
    return folder


def every(name, folder, **options):
    opened = (sources.open_source(name, s, data_dir=folder, **options) for s in sources.SPLITS)
    return {example["id"]: example for split in opened for example in split}


def test_stamps_come_with_picture_caption_kind_and_voice(tmp_path):
    found = every("stamps/fr", write_stamps(tmp_path), voice="fr")
    assert set(found) == set(NAMES[2:])
    for i, name in enumerate(NAMES[2:], 2):
        example = found[name]
        assert example["caption"] == f"Une chose {name[-2:]}." and example["language"] == "fr"
        assert example["kind"] == "food"
        np.testing.assert_allclose(
            Image(48, 48).prepare(example["image"]), noise(i)[..., :3] / 127.5 - 1, atol=1e-6
        )
        frames = Sound().prepare(example["sound"])
        assert 48 <= len(frames) <= 51  # of any rate, half a second is fifty frames
    assert all("sound" not in example for example in every("stamps", tmp_path).values())


def test_a_language_has_the_stamps_that_have_a_caption_in_it(tmp_path):
    found = every("stamps/fr,en", write_stamps(tmp_path))
    assert Counter(each["language"] for each in found.values()) == {"en": 36, "fr": 35}
    assert found[f"{NAMES[1]}/en"]["caption"] == "A thingab."
    assert found[f"{NAMES[1]}/fr"]["caption"] == "Une chose ab."
    assert not every("stamps/de", tmp_path)


def test_splits_are_by_family(tmp_path):
    write_stamps(tmp_path)
    for split in sources.SPLITS:
        for example in sources.open_source("stamps", split, data_dir=tmp_path):
            assert stamps.split_of(example["family"]) == split


def test_drawings_in_svg_are_drawn(tmp_path):
    package("resvg_py", "stamps")
    write_stamps(tmp_path, {f"{NAMES[5]}.png": None, f"{NAMES[5]}.svg": SVG})
    drawn = pillow.open(io.BytesIO(every("stamps", tmp_path)[NAMES[5]]["image"]))
    assert drawn.size == (256, 256)
    assert drawn.getpixel((60, 128)) == (255, 0, 0, 255)
    assert drawn.getpixel((200, 128))[3] == drawn.getpixel((60, 30))[3] == 0


def test_a_drawing_without_the_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install crossattn\[stamps\]"):
        stamps.drawn(SVG.encode())


def test_pictures_stand_whole_in_a_square():
    wide = np.zeros((100, 600, 4), np.uint8)
    wide[:, :, 3], wide[:, 300:, 1] = 255, 255  # black and green
    found = np.asarray(pillow.open(io.BytesIO(stamps.squared(png(wide)))))
    assert found.shape == (256, 256, 4)
    assert (found[110:145, :120] == (0, 0, 0, 255)).all()
    assert (found[110:145, 140:] == (0, 255, 0, 255)).all()
    assert not found[:100, :, 3].any() and not found[160:, :, 3].any()
    assert pillow.open(io.BytesIO(stamps.squared(png(noise(0))))).size == (48, 48)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({f"{NAMES[0]}.txt": b"\xff\xfe"}, r"food/thingaa cannot be read \(UnicodeDecodeError"),
        (
            {f"{n}.txt": None for n in [*NAMES, "food/lacks_a_picture"]},
            "no stamps with a picture, a cap",
        ),
        (
            {f"{NAMES[0]}.png": b"no picture"},
            r"food/thingaa cannot be read \(ValueError: Unidentified",
        ),
    ],
)
def test_a_package_with_wrong_stamps_is_named(tmp_path, changed, complaint):
    write_stamps(tmp_path, changed)
    with pytest.raises(DataUnavailable, match=complaint) as caught:
        sources.open_source("stamps", data_dir=tmp_path)
    assert "put tuxpaint-stamps-default_*.deb in" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("stamps/xx", {}, "no captions in 'xx'; expected some of en, ach"),
        ("stamps/en,en", {}, "names a language twice"),
        ("stamps:en", {}, "expected stamps/LANGUAGE"),
        ("stamps", {"voice": "ja"}, "voice is 'ja'; expected none or one of fr, ru"),
        ("stamps", {"voices": "fr"}, "did you mean voice"),
    ],
)
def test_a_bad_name_is_refused_before_anything_is_fetched(name, options, complaint, tmp_path):
    with pytest.raises(DataError, match=complaint):
        sources.open_source(name, data_dir=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "same",
    [
        ("cherries2", "Some cherries", "A cherry"),
        ("apple_green", "apple_red", "A red apple", "apple"),
        ("grave-a", "grave-j"),
        ("eye_blue_left", "manga_eye_right", "An eye"),
        ("cementmixer_old", "cementmixer-2"),
        ("greenFlag", "A white flag"),
        ("gnu-baby-stand", "gnu-sitting"),
    ],
)
def test_names_of_variants_are_one_key(same):
    assert len({stamps.key_of(name) for name in same}) == 1


def test_names_of_other_things_are_other_keys():
    others = ["apple", "apple_core", "orange", "red", "bus", "glass", "glasses", "hat", "party-hat"]
    assert len({stamps.key_of(name) for name in others}) == len(others)
    assert stamps.key_of("A") == stamps.key_of("1") == ""


def disc(radius, colour, stripe=None):
    """A disc, perhaps with a stripe from top to bottom right of its middle."""
    down, right = np.mgrid[:48, :48] - 23.5
    inside = down**2 + right**2 <= radius**2
    pixels = np.zeros((48, 48, 4), np.uint8)
    pixels[inside] = (*colour, 255)
    if stripe is not None:
        pixels[inside & (right > 5) & (right < 12)] = (*stripe, 255)
    return pixels


def test_drawings_in_other_colours_or_mirrored_are_the_same():
    def small(pixels):
        return small_picture(png(pixels))

    one = small(disc(20, (200, 40, 40), (250, 250, 250)))
    recoloured = small(disc(20, (20, 90, 60), (120, 200, 255)))
    assert stamps.same_drawing(one, recoloured)
    assert not stamps.same_drawing(one, recoloured[:, ::-1])
    assert list(stamps._same_drawings(np.stack([one, recoloured[:, ::-1]]))) == [(0, 1)]
    for other in (
        disc(16, (200, 40, 40), (250, 250, 250)),  # another outline
        disc(20, (200, 200, 200), (20, 20, 20)),  # dark where that is light
        disc(20, (200, 40, 40)),  # nothing to see inside
    ):
        assert not stamps.same_drawing(one, small(other))


def test_families_join_by_keys_and_by_pairs():
    keys = [["d"], ["b", "c"], ["c"], ["e"], ["a", "d"], ["f"]]
    assert families(keys) == ["a", "b", "b", "e", "a", "f"]
    assert families(keys, [(2, 0), (5, 3)]) == ["a", "a", "a", "e", "a", "e"]


@pytest.mark.parametrize("seed", range(20))
def test_families_are_the_connected_components_in_any_order(seed):
    draw = np.random.default_rng(seed)
    keys = [[f"k{k}" for k in draw.integers(0, 30, draw.integers(1, 4))] for _ in range(25)]
    graph = np.zeros((30, 30), bool)
    for own in keys:
        numbers = [int(key[1:]) for key in own]
        graph[np.ix_(numbers, numbers)] = True
    for _ in range(30):
        graph |= graph @ graph
    expected = [min(f"k{i}" for i in np.flatnonzero(graph[int(own[0][1:])])) for own in keys]
    assert families(keys) == expected


# --- the real ones, where they were fetched before


def real(voice: str):
    if not (fetch.cache_dir() / "tfds" / "stamps" / voice).is_dir():
        pytest.skip(
            f"not fetched yet: crossattn.data.sources.open_source('stamps', voice={voice!r})"
        )
    return [(s, e) for s in sources.SPLITS for e in sources.open_source("stamps", s, voice=voice)]


def test_real_stamps_never_straddle():
    found = real("none")
    assert Counter(split for split, _ in found) == {"train": 538, "validation": 70, "test": 93}
    where, captions = defaultdict(set), defaultdict(set)
    for split, example in found:
        where[example["family"]].add(split)
        captions[example["caption"].strip(".").lower()].add(split)
    assert all(len(splits) == 1 for splits in (*where.values(), *captions.values()))
    family = {example["id"]: example["family"] for _, example in found}
    for twins in (
        "food/fruit/apple_green food/fruit/apple_red food/fruit/cartoon/apple",
        "food/fruit/strawberry food/fruit/Strawberry2 food/fruit/cartoon/strawberry",
        "town/flags/greenflag town/flags/checkeredflag town/flags/blue-and-yellowflag",
        "clothes/hats/blue_fedora clothes/hats/green_fedora",
        "seasonal/christmas/elfhat seasonal/christmas/santahat2",
        "seasonal/hanukkah/dreydl seasonal/hanukkah/dreydl-shin seasonal/hanukkah/dreydl-hay",
        "military/fireman240a people/fireman240a",
        "animals/mammals/cats/lion animals/mammals/cats/cartoon/lion",
        "people/body_parts/manga_eye_left people/body_parts/eye_green_left",
        "vehicles/iso_lorry1 vehicles/iso_lorry3",
    ):
        assert len({family[id] for id in twins.split()}) == 1
    # Most are families of their own, or the rule would join what is not alike.
    assert 500 < len(where) < 560
    # As pixels: no picture looks like one of another split, in its colours, mirrored or not.
    small = np.stack([small_picture(example["image"]) for _, example in found])
    split = np.array([split for split, _ in found])
    covered = small[..., 3].sum((1, 2))
    for rows in (small, small[:, :, ::-1]):
        flat, other = small.reshape(len(small), -1), rows.reshape(len(small), -1)
        distances = (flat**2).sum(1)[:, None] + (other**2).sum(1) - 2 * flat @ other.T
        distances /= 4 * np.maximum(covered[:, None], covered)  # of a number of a covered pixel
        assert (distances[split[:, None] != split] > 0.02).all()


def test_real_stamps_are_spoken():
    found = real("fr")
    assert len(found) == 676
    for _, example in found[::40]:
        assert 30 < Sound().length(example["sound"]) < 1000
