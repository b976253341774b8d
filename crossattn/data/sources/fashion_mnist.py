"""Fashion-MNIST: 70,000 grey pictures of clothes, 28 by 28, in ten classes (Xiao et al. 2017, MIT).

From the Debian package `dataset-fashion-mnist`. The test pictures are those of the publication; the last
5,000 of its training pictures are for validation.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import UInt8

from crossattn.data import archives, fetch, records
from crossattn.data.errors import absent
from crossattn.data.sources import Example, MappedSource

FORM = "fashion_mnist"
CLASSES = {
    "label": (
        "T-shirt/top", "trouser", "pullover", "dress", "coat",
        "sandal", "shirt", "sneaker", "bag", "ankle boot",
    )
}  # fmt: skip
_PACKAGE = "dataset-fashion-mnist"
_PREFIX = "usr/share/datasets/fashion-mnist/"
_VALIDATION = 12  # training pictures for one of validation
_LARGEST = 2**27  # bytes


def open_split(rest: str, split: str, *, data_dir: Any = None) -> Sequence[Example]:
    """Returns examples {"id", "image", "label"}: uint8 [28 28], white on black, and the name of a class."""
    return MappedSource(records.prepared(FashionMnist, "all", split, data_dir), _example)


def _example(row: dict[str, Any]) -> Example:
    name = CLASSES["label"][int(row["label"])]
    return {"id": records.text_of(row["id"]), "image": row["image"], "label": name}


class FashionMnist(records.PackageBuilder):
    """Features `id`, `image` uint8 [28 28] and `label`."""

    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="all", description="All pictures")]

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "id": tfds.features.Text(),
            "image": tfds.features.Tensor(shape=(28, 28), dtype=np.uint8),
            "label": tfds.features.ClassLabel(names=CLASSES["label"]),
        }
        return self.described(
            __doc__, features, "https://github.com/zalandoresearch/fashion-mnist", "MIT"
        )

    def _split_generators(self, dl_manager):
        (package,) = fetch.debian_packages([_PACKAGE], self.files_dir)
        files = dict(archives.read_deb(package, _PREFIX, ".gz"))
        try:
            train, test = (read_pictures(files, name) for name in ("train", "t10k"))
        except archives.Damaged as error:
            reason = f"{package.name}: {error}"
            raise absent([f"{_PACKAGE}_*.deb"], package.parent, reason) from None
        first = len(train[0]) - len(train[0]) // _VALIDATION
        return {
            "train": self._generate_examples(_rows("train", *train, range(first))),
            "validation": self._generate_examples(
                _rows("train", *train, range(first, len(train[0])))
            ),
            "test": self._generate_examples(_rows("test", *test, range(len(test[0])))),
        }


def _rows(name: str, images: Any, labels: Any, indices: range) -> Iterator[dict[str, Any]]:
    for i in indices:
        yield {"id": f"{name}-{i}", "image": images[i], "label": int(labels[i])}


def read_pictures(
    files: dict[str, bytes], name: str
) -> tuple[UInt8[np.ndarray, "n 28 28"], UInt8[np.ndarray, " n"]]:
    """Returns the pictures and labels of the files of a name.

    Raises:
        Damaged: they are missing, not whole, or do not belong together.
    """
    images = read_idx(files, f"{name}-images-idx3-ubyte.gz")
    labels = read_idx(files, f"{name}-labels-idx1-ubyte.gz")
    if images.shape != (len(labels), 28, 28) or labels.max(initial=0) >= len(CLASSES["label"]):
        shapes = f"{list(images.shape)} and {list(labels.shape)}"
        raise archives.Damaged(f"its {name} pictures and labels are of shapes {shapes}")
    return images, labels


def read_idx(files: dict[str, bytes], name: str) -> UInt8[np.ndarray, "..."]:
    """Reads an array of bytes in the format of MNIST: two zeros, the type 8, the axes and their sizes.

    Raises:
        Damaged: it is missing, not whole, or no such array.
    """
    if name not in files:
        raise archives.Damaged(f"it lacks {name}")
    raw = archives.gunzip(files[name], _LARGEST)
    axes = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) > 3 else 0
    shape = np.frombuffer(raw[4 : 4 + 4 * axes], ">u4").astype(int)
    if not axes or len(shape) != axes or len(raw) - 4 - 4 * axes != shape.prod():
        raise archives.Damaged(f"{name} in it is no array of bytes of the size that it says")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
