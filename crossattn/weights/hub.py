"""Where a checkpoint's folder is: here, or fetched from the Hugging Face hub."""

from pathlib import Path

from crossattn.weights.safetensors import CheckpointError

# Never pickles, nor another framework's weights.
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm"]


def find_folder(source: str | Path) -> Path:
    """The folder of that path; or of that name on the hub, with the files a checkpoint needs.

    Raises:
      CheckpointError: there is no such folder, and no hub or no such name on it.
    """
    folder = Path(source)
    if folder.is_dir():
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
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # the hub, the network and the client all have errors of their own
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{name} is neither a folder nor to be had from the hub: {reason}"
        ) from error
