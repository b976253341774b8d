"""Stamps of a drawing program: pictures, captions in 67 languages, and spoken captions in nine.

"stamps/en", or several, "stamps/en,fr"; `data.options.voice=fr` adds the caption as it is spoken in French,
and leaves out stamps that nobody speaks. From the Debian package `tuxpaint-stamps-default` (GPL-2):
photographs and drawings, in folders by kind. Left out are letters, digits, coins and other `symbols`, and
languages with captions of fewer than half of the stamps, or recordings of fewer than two fifths.

Stamps that show the same thing are one family: by the words of their file's name or of their caption's
first sentence, less numbers, colours, sizes and poses (`key_of`), or by drawings of one outline whose light
and dark agree (`same_drawing`). A family is in one split: of a hundred about ten are test and ten
validation.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Float

from crossattn.data import archives, fetch, records
from crossattn.data.errors import DataError, absent, needs
from crossattn.data.families import families, small_picture
from crossattn.data.sources import Example, MappedSource, Option, hashed_split

FORM = "stamps/LANGUAGE or stamps/LANGUAGE,LANGUAGE,..."
LANGUAGES = (
    "en", "ach", "af", "am", "an", "ar", "ast", "be", "bg", "ca", "ca@valencia", "cs", "da", "de", "el",
    "en_AU", "en_GB", "eo", "es", "eu", "fa", "ff", "fi", "fr", "ga", "gd", "gl", "gu", "he", "hi", "hr",
    "hu", "hy", "id", "is", "it", "iu", "ja", "ka", "km", "ko", "lv", "ml", "ms", "nb", "nl", "nn", "pl",
    "pt", "pt_BR", "ro", "ru", "sk", "sl", "son", "sq", "sr", "sr@latin", "sv", "th", "tr", "uk", "vec",
    "vi", "zh_CN", "zh_TW", "zu",
)  # fmt: skip
VOICES = ("fr", "ru", "ca", "ro", "bg", "es", "be", "el", "da")
CLASSES = {
    "kind": (
        "animals", "clothes", "food", "hobbies", "household", "medical", "military", "naturalforces",
        "people", "plants", "seasonal", "space", "sports", "town", "vehicles",
    ),
    "language": LANGUAGES,
}  # fmt: skip
OPTIONS = {
    "voice": Option(
        str, "Language of the spoken captions; none has none.", choices=("none", *VOICES)
    )
}
_PACKAGE = "tuxpaint-stamps-default"
_PREFIX = "usr/share/tuxpaint/stamps/"
_SIDE = 256  # the most pixels of a picture's side


def open_split(
    languages: str, split: str, *, data_dir: Any = None, voice: str = "none"
) -> Sequence[Example]:
    """Returns examples {"id", "image", "caption", "language", "kind", "family"}; English by default.

    The image is the bytes of a PNG, the stamp in the middle of a transparent square of at most 256 pixels a
    side. With a voice there is also "sound", the bytes of an OGG file of 8 to 44.1 kHz. Several languages
    come one after the other, each with all stamps that have a caption in it.
    """
    chosen = languages.split(",") if languages else ["en"]
    if unknown := [each for each in chosen if each not in LANGUAGES]:
        raise DataError(
            f"stamps has no captions in {unknown[0]!r}; expected some of {', '.join(LANGUAGES)}"
        )
    if len(set(chosen)) < len(chosen):
        raise DataError(f"stamps/{languages} names a language twice")
    if voice not in ("none", *VOICES):
        raise DataError(
            f"data.options.voice is {voice!r}; expected none or one of {', '.join(VOICES)}"
        )
    rows = records.prepared(Stamps, voice, split, data_dir)
    texts = [records.text_of(row["captions"]).split("\n") for row in rows]
    numbers = [LANGUAGES.index(each) for each in chosen]
    captioned = [(row, n) for n in numbers for row, own in enumerate(texts) if own[n]]
    return MappedSource(
        captioned, lambda item: _example(rows[item[0]], LANGUAGES[item[1]], len(chosen) > 1)
    )


def _example(row: Mapping[str, Any], language: str, several: bool) -> Example:
    id = records.text_of(row["id"])
    example = {
        "id": f"{id}/{language}" if several else id,
        "image": row["image"],
        "caption": records.text_of(row["captions"]).split("\n")[LANGUAGES.index(language)],
        "language": language,
        "kind": CLASSES["kind"][int(row["kind"])],
        "family": records.text_of(row["family"]),
    }
    return example | ({"sound": row["sound"]} if "sound" in row else {})


class Stamps(records.PackageBuilder):
    """Configs "none" and one a voice; features `id`, `image`, `kind`, `family`, `captions` in lines.

    A line is a caption, in the order of `LANGUAGES`. A voice has `sound` too. Preparing holds the package and
    one voice in memory.
    """

    VERSION = tfds.core.Version("1.1.0")  # families are named by the least of their keys
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=voice, description=f"Spoken captions: {voice}")
        for voice in ("none", *VOICES)
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        text, raw = tfds.features.Text(), tfds.features.Scalar(dtype=np.str_)
        features = {
            "id": text,
            "image": raw,  # bytes; as an Image it would be decoded
            "captions": text,  # in one text, which is read faster than many
            "kind": tfds.features.ClassLabel(names=CLASSES["kind"]),
            "family": text,
        }
        if self.builder_config.name != "none":
            features["sound"] = raw
        return self.described(__doc__, features, "https://tuxpaint.org", "GPL-2")

    def _split_generators(self, dl_manager):
        (package,) = fetch.debian_packages([_PACKAGE], self.files_dir)
        found = read_stamps(package, self.builder_config.name)
        if not any(each.get("sound", b"") is not None for each in found):
            reason = f"{package.name} has no stamps with a picture, a caption and a recording"
            raise absent([f"{_PACKAGE}_*.deb"], package.parent, reason)
        told = zip(found, families_of(found), strict=True)
        whole = [example | {"family": family} for example, family in told]
        return self.by_split(
            (split_of(example["family"]), example)
            for example in whole
            if example.get("sound") is not None or self.builder_config.name == "none"
        )


def read_stamps(package: Any, voice: str) -> list[dict[str, Any]]:
    """Returns the stamps of the package by name, `sound` None where the voice does not speak one.

    Raises:
        DataUnavailable: the package is not whole, or has a file that is no text.
        ModuleNotFoundError: the library that draws SVG is not installed.
    """
    endings = [".png", ".svg", ".txt"]
    if voice != "none":
        endings.append(f"_desc_{voice}.ogg")
    files: dict[str, dict[str, bytes]] = {}
    for path, raw in archives.read_deb(package, _PREFIX):
        ending = next((each for each in endings if path.endswith(each)), None)
        if ending is not None and path.partition("/")[0] in CLASSES["kind"]:
            files.setdefault(path.removesuffix(ending), {})[ending] = raw
    found = []
    for name, own in sorted(files.items()):
        if ".txt" not in own or not own.keys() & {".png", ".svg"}:
            continue
        kind = CLASSES["kind"].index(name.partition("/")[0])
        try:
            captions = "\n".join(read_captions(own[".txt"]))
            image = squared(own[".png"] if ".png" in own else drawn(own[".svg"]))
        except ValueError as error:  # of another encoding, or no picture
            reason = f"{package.name}: {name} cannot be read ({records.first_line(error)})"
            raise absent([f"{_PACKAGE}_*.deb"], package.parent, reason) from None
        example = {"id": name, "image": image, "captions": captions, "kind": kind}
        found.append(example | ({} if voice == "none" else {"sound": own.get(endings[-1])}))
    return found


def read_captions(raw: bytes) -> list[str]:
    """Returns the captions of a text file in the order of `LANGUAGES`, "" where there is none.

    The first line is English; others are "fr.utf8=...".
    """
    first, *others = raw.decode("utf-8").split("\n")
    said = dict(line.split("=", 1) for line in others if "=" in line)
    lines = [first, *(said.get(f"{language}.utf8", "") for language in LANGUAGES[1:])]
    return [" ".join(line.split()) for line in lines]


def drawn(svg: bytes) -> bytes:
    """Returns a drawing as a PNG, `_SIDE` pixels wide.

    Raises:
        ValueError: it is no SVG.
    """
    with needs("drawings of stamps are drawn with resvg-py", "stamps"):
        import resvg_py
    # Without fonts of the machine, on which no stamp depends; 96 pixels are an inch, as in CSS.
    text = svg.decode("utf-8")
    return bytes(
        resvg_py.svg_to_bytes(svg_string=text, width=_SIDE, dpi=96, skip_system_fonts=True)
    )


def squared(png: bytes) -> bytes:
    """Returns a picture in the middle of a transparent square, made smaller to `_SIDE` pixels at most.

    Raises:
        ValueError: it is no picture.
    """
    with needs("images are read with Pillow", "images"):
        from PIL import Image
    try:
        picture = Image.open(io.BytesIO(png), formats=["PNG"]).convert("RGBA")
    except Exception as error:  # damage makes Pillow's readers raise almost anything
        raise ValueError(records.first_line(error)) from None
    picture.thumbnail((_SIDE, _SIDE))
    side = max(picture.size)
    square, buffer = Image.new("RGBA", (side, side)), io.BytesIO()
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    square.save(buffer, "PNG")
    return buffer.getvalue()


def split_of(family: str) -> str:
    """Returns the split of a family: 10 % test, 10 % validation."""
    return hashed_split(family, test=10, validation=10)


def families_of(examples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the family of each stamp, from its name, its English caption and its picture."""
    keys = []
    for each in examples:
        caption = re.split(r"[.!?]", each["captions"].split("\n")[0], maxsplit=1)[0]
        name = each["id"].rpartition("/")[2]
        keys.append([key for key in (key_of(name), key_of(caption)) if key] or [each["id"]])
    small = np.stack([small_picture(each["image"]) for each in examples])
    return families(keys, _same_drawings(small))


# Words that tell apart stamps of the same thing.
_VARIANTS = set(
    # articles and the like
    "an the of some pair our very this is it and with as from another or two your for says cluster "
    "bunch head "
    # colours
    "red green blue yellow white black brown purple pink grey gray golden gold silver orange color "
    "colour colorful "
    # sizes, ages and makings
    "small big large little huge old new fashioned modern baby toy cartoon photo drawing outline "
    "plastic manga "
    # poses and parts of a series
    "left right front side profile mirror in out open closed stand standing sitting flying eating "
    "whole full "
    "crescent round square sliced slice shelled checkered".split()
)


def key_of(text: str) -> str:
    """Returns the sorted words of a name or a caption that say what a stamp shows; "" where none is left.

    Words have two letters or more, singular, without those of variants: "cherry" of `cherries2`, "flag" of "A
    green flag.". A name of variants alone, such as "orange", keeps them.
    """
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    words = [word.lower() for word in re.findall(r"[^\W\d_]{2,}", apart)]
    kept = [word for word in words if word not in _VARIANTS]
    return " ".join(sorted({_singular(word) for word in kept or words}))


def _singular(word: str) -> str:
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _same_drawings(small: Float[np.ndarray, "n 24 24 4"]) -> Iterator[tuple[int, int]]:
    """Yields pairs of pictures that are the same drawing, mirrored or not."""
    for number, picture in enumerate(small):
        others = small[number + 1 :]
        for turned in (picture, picture[:, ::-1]):
            for near in np.flatnonzero(_same_outline(turned, others)):
                if same_drawing(turned, others[near]):
                    yield number, number + 1 + int(near)


def same_drawing(one: Float[np.ndarray, "24 24 4"], other: Float[np.ndarray, "24 24 4"]) -> bool:
    """Returns whether two pictures have one outline, and light and dark at the same places in any colour."""
    inside = np.minimum(one[..., 3], other[..., 3])
    light, other_light = (_centred(each[..., :3].mean(-1), inside) for each in (one, other))
    power = (inside * light**2).sum() * (inside * other_light**2).sum()
    agree = (inside * light * other_light).sum() > 0.7 * np.sqrt(power)
    return bool(agree and _same_outline(one, other))


def _same_outline(one: np.ndarray, other: np.ndarray) -> Any:
    return np.square(one[..., 3] - other[..., 3]).mean((-2, -1)) < 0.0025


def _centred(light: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return light - (light * weight).sum() / max(weight.sum(), 1e-6)
