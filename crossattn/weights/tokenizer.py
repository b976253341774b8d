"""The tokenizer that lies beside a checkpoint."""

from pathlib import Path
from typing import Any

from crossattn.weights.safetensors import CheckpointError


def read_tokenizer(folder: Path) -> Any:
    """A ``tokenizers.Tokenizer`` of the folder's ``tokenizer.json``; None where there is none.

    Raises:
      CheckpointError: the file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError(
            f"reading {path} needs tokenizers: pip install 'crossattn[weights]'"
        ) from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the backend raises bare Exception on a malformed file
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
