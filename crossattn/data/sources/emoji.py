"""Emoji of Twitter, 64 by 64, with captions in 28 languages: "emoji/en", or several, "emoji/en,fr".

From the npm packages `emoji-datasource-twitter` (MIT; images CC BY 4.0) and `emojibase-data` (MIT). Emoji
that differ in skin tone, gender or direction alone are one family, and so are those with the same picture,
mirrored or not (flags of territories, left and right hands). A family is in one split: of a hundred about ten
are test and ten validation.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Float

from crossattn.data import archives, fetch, records
from crossattn.data.errors import DataError, absent
from crossattn.data.families import families, small_picture
from crossattn.data.sources import Example, MappedSource, hashed_split

FORM = "emoji/LANGUAGE or emoji/LANGUAGE,LANGUAGE,..."
LANGUAGES = (
    "bn", "da", "de", "en", "en-gb", "es", "es-mx", "et", "fi", "fr", "hi", "hu", "it", "ja", "ko", "lt",
    "ms", "nb", "nl", "pl", "pt", "ru", "sv", "th", "uk", "vi", "zh", "zh-hant",
)  # fmt: skip
CLASSES = {
    "group": (
        "smileys-emotion", "people-body", "component", "animals-nature", "food-drink",
        "travel-places", "activities", "objects", "symbols", "flags",
    ),
    "language": LANGUAGES,
}  # fmt: skip
_IMAGES = ("emoji-datasource-twitter", "16.0.0")
_CAPTIONS = ("emojibase-data", "17.0.0")
_IMAGE_PREFIX = "package/img/twitter/64/"
_SAME_PICTURE = 5e-4  # mean squared difference of the pixels of the same picture, drawn again
_BLOCK = 512


def open_split(languages: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns examples {"id", "image", "caption", "group", "language", "family"}; English by default.

    The image is the bytes of a PNG, on a transparent ground. Several languages come one after the other, each
    with all emoji.
    """
    chosen = languages.split(",") if languages else ["en"]
    if unknown := [each for each in chosen if each not in LANGUAGES]:
        raise DataError(
            f"emoji has no captions in {unknown[0]!r}; expected some of {', '.join(LANGUAGES)}"
        )
    if len(set(chosen)) < len(chosen):
        raise DataError(f"emoji/{languages} names a language twice")
    rows = records.prepared(Emoji, "all", split, data_dir)
    if len(chosen) == 1:
        return MappedSource(rows, functools.partial(_example, language=chosen[0]))

    def in_language(number: int) -> Example:
        language, row = divmod(number, len(rows))
        example = _example(rows[row], chosen[language])
        return example | {"id": f"{example['id']}/{example['language']}"}

    return MappedSource(range(len(rows) * len(chosen)), in_language)


def _example(row: dict[str, Any], language: str) -> Example:
    return {
        "id": records.text_of(row["id"]),
        "image": row["image"],
        "caption": records.text_of(row["captions"]).split("\n")[LANGUAGES.index(language)],
        "group": CLASSES["group"][int(row["group"])],
        "language": language,
        "family": records.text_of(row["family"]),
    }


class Emoji(records.PackageBuilder):
    """Features `id` (code points), `image` (bytes of a PNG), `captions` (a line a language), `group`."""

    IMAGES_SHA256 = "f64a530c63bca463bd8317fdc4615ce63a53a0c65018e4ce2d848aaba7a28877"
    CAPTIONS_SHA256 = "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a"
    VERSION = tfds.core.Version("2.0.0")  # families by pictures, too
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="all", description="All languages")]

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = {
            "id": text,
            "image": tfds.features.Scalar(dtype=np.str_),  # bytes; as an Image it would be decoded
            "captions": text,  # in one text, which is read four times as fast as many
            "group": tfds.features.ClassLabel(names=CLASSES["group"]),
            "family": text,
        }
        return self.described(
            __doc__, features, "https://github.com/iamcal/emoji-data", "CC BY 4.0 and MIT"
        )

    def _split_generators(self, dl_manager):
        images = fetch.npm_package(*_IMAGES, self.IMAGES_SHA256, self.files_dir)
        captions = fetch.npm_package(*_CAPTIONS, self.CAPTIONS_SHA256, self.files_dir)
        said = archives.read_tgz(captions, "package/", "/data.json")
        texts = {name.removesuffix("/data.json"): read_captions(raw) for name, raw in said}
        if missing := [language for language in LANGUAGES if language not in texts]:
            reason = f"it has no captions in {missing[0]}"
            raise absent([captions.name], captions.parent, reason)
        found = []
        for name, raw in sorted(archives.read_tgz(images, _IMAGE_PREFIX, ".png")):
            code = name.removesuffix(".png").upper()
            told = [texts[language].get(_plain(code), ("", None)) for language in LANGUAGES]
            group = texts["en"].get(_plain(code), ("", None))[1]
            if group is None or not all(caption for caption, _ in told):
                continue
            lines = "\n".join(caption for caption, _ in told)
            example = {"id": code, "image": raw, "captions": lines, "group": group}
            found.append(example)
        families = families_of(found)
        told = [
            example | {"family": family} for example, family in zip(found, families, strict=True)
        ]
        return self.by_split([(split_of(example["family"]), example) for example in told])


def read_captions(raw: bytes) -> Mapping[str, tuple[str, int | None]]:
    """Returns caption and number of the group of each emoji of a language, skin tones too, by code points."""
    captions = {}
    for entry in json.loads(raw):
        for each in (entry, *entry.get("skins", ())):
            captions[_plain(each["hexcode"])] = " ".join(each["label"].split()), each.get("group")
    return captions


def split_of(family: str) -> str:
    """Returns the split of a family: 10 % test, 10 % validation."""
    return hashed_split(family, test=10, validation=10)


def families_of(examples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the family of each emoji, from its code points and its picture.

    Families with a picture in common, mirrored or not, are one, by the least of their names.
    """
    small = np.stack([small_picture(each["image"]) for each in examples])
    return families([[family_of(each["id"])] for each in examples], _same_pictures(small))


def _same_pictures(small: Float[np.ndarray, "n 24 24 4"]) -> Iterator[tuple[int, int]]:
    """Yields pairs of pictures that are the same, mirrored or not."""
    flat, mirrored = small.reshape(len(small), -1), small[:, :, ::-1].reshape(len(small), -1)
    norms = (flat**2).sum(1)
    for other in (flat, mirrored):
        for first in range(0, len(flat), _BLOCK):
            rows = slice(first, first + _BLOCK)
            distances = norms[rows, None] + norms - 2 * flat[rows] @ other.T
            for a, b in np.argwhere(distances < _SAME_PICTURE * flat.shape[1]):
                yield first + a, b


# Grown-ups, children and the old, each as the one without a gender.
_PEOPLE = {
    "1F468": "1F9D1", "1F469": "1F9D1", "1F466": "1F9D2",
    "1F467": "1F9D2", "1F474": "1F9D3", "1F475": "1F9D3",
}  # fmt: skip
# Members of a family with a code point of their own.
_SAME = {
    "1F478": "1F934",  # princess, prince
    "1FAC5": "1F934",  # person with crown
    "1F936": "1F385",  # Mrs. Claus, Santa Claus
    "1F9D1-1F384": "1F385",  # Mx Claus
    "1F483": "1F57A",  # woman dancing, man dancing
    "1F930": "1FAC4",  # pregnant woman, person
    "1FAC3": "1FAC4",  # pregnant man
    "1F46C": "1F46B",  # men holding hands, woman and man
    "1F46D": "1F46B",  # women holding hands
    "1F9D1-1F91D-1F9D1": "1F46B",  # people holding hands
    "1F9D1-2764-1F48B-1F9D1": "1F48F",  # kiss
    "1F9D1-2764-1F9D1": "1F491",  # couple with heart
    "1FAF1-1FAF2": "1F91D",  # handshake of two skin tones
    "1F9D1-1F37C": "1F931",  # feeding a baby, breast-feeding
}


def family_of(code: str) -> str:
    """Returns the common part of an emoji's family: "1F9D1-2695" of "1F468-1F3FD-200D-2695-FE0F"."""
    parts = [
        _PEOPLE.get(part, part)
        for part in code.split("-")
        # joiners, emoji presentation, female, male, facing right, skin tones
        if not re.fullmatch(r"200D|FE0F|2640|2642|27A1|1F3F[B-F]", part)
    ]
    if len(parts) > 1 and set(parts) <= {"1F9D1", "1F9D2"}:
        return "1F46A"  # families of any members
    return _SAME.get("-".join(parts), "-".join(parts) or code)


def _plain(code: str) -> str:
    """Returns code points without those that ask for a picture, which sources write or leave out."""
    return "-".join(part for part in code.split("-") if part != "FE0F")
