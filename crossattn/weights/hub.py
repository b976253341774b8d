"""Where a checkpoint's folder is: here, or fetched from the Hugging Face hub."""

import fnmatch
from pathlib import Path
from typing import Any

from crossattn.weights.formats.pickles import only_pickles, refusal
from crossattn.weights.formats.safetensors import WEIGHTS, CheckpointError
from crossattn.weights.settings import read_settings

# Configs, tokenizers: what lies beside the weights. Never pickles, nor another framework's weights.
_BESIDE = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja")


def find_folder(source: str | Path) -> Path:
    """The folder of that path; or of that name on the hub, with the files a checkpoint needs.

    Raises:
      CheckpointError: there is no such folder, and no hub or no such name on it; or its weights are
        pickles.
    """
    folder = Path(source)
    if folder.is_dir():
        files = [path.name for path in folder.iterdir()]
        if only_pickles(files):
            raise refusal(source, files, read_settings(folder / "config.json")[1], source)
        return folder
    if folder.exists():
        raise CheckpointError(f"{source} is a file; expected the folder that it is in.")
    name = str(source)
    if isinstance(source, Path) or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"there is no folder {source}.")
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"there is no folder {source}; if it is a name on the Hugging Face hub: "
            "pip install 'crossattn[hub]'."
        ) from None
    try:
        return _fetched(huggingface_hub, name)
    except CheckpointError:
        raise
    except Exception as error:  # the hub, the network and the client all have errors of their own
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{name} is neither a folder nor to be had from the hub: {reason}"
        ) from error


def _fetched(hub: Any, name: str) -> Path:
    """The files of a repository that a checkpoint needs; without a network, those that are here."""
    try:
        files = [file for file in hub.list_repo_files(name) if "/" not in file]
    except Exception as unreachable:
        try:
            return Path(hub.snapshot_download(name, local_files_only=True))
        except Exception:
            raise unreachable from None
    if only_pickles(files):
        folder = Path(hub.snapshot_download(name, allow_patterns=["config.json"]))
        settings = read_settings(folder / "config.json")[1]
        raise refusal(name, files, settings, name.rpartition("/")[2])
    return Path(hub.snapshot_download(name, allow_patterns=wanted(files)))


def wanted(files: list[str]) -> list[str]:
    """Of a repository's files at its top, those to fetch: the weights once, and what lies beside them.

    Variants of the weights (``model.fp16.safetensors``) stay there, and the parts of what is there whole.
    """
    parts = [f for f in fnmatch.filter(files, "*-of-*.safetensors") if f.count(".") == 1]
    beside = [f for f in files if any(fnmatch.fnmatch(f, pattern) for pattern in _BESIDE)]
    return sorted([*beside, *([WEIGHTS] if WEIGHTS in files else parts)])
