"""The text side of a task: sources by split, and tokenizers trained once and kept with the run.

The one thing to know: parameters mean nothing under another tokenizer, so a run writes down the SHA-256 of
those that it was trained with, and none is read, or trained anew, in their place.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from crossattn.data.errors import DataError
from crossattn.data.sources import open_source
from crossattn.data.tokenizers import Tokenizer, train_tokenizer
from crossattn.train.storage import Folder, local_copy, write_whole

_LOG = logging.getLogger(__name__)
_SUMS = "sha256.json"


class Corpus:
    """Sources and tokenizers of ``config.data`` and ``config.tokenizer``.

    Args:
      config: the whole config.
      assets: folder of a run whose tokenizers are used; None, or an empty one, trains them.
    """

    def __init__(self, config: Any, assets: Folder | None = None):
        self.config = config
        self.assets = assets
        self._splits: dict[str, Sequence[dict[str, Any]]] = {}

    def split(self, name: str) -> Sequence[dict[str, Any]]:
        """The examples of "train", "validation" or "test"."""
        if name not in self._splits:
            data = self.config.data
            self._splits[name] = open_source(
                data.name,
                data.get("splits", {}).get(name, name),
                data_dir=data.get("data_dir"),
                reverse=data.get("reverse", False),
                **data.get("options", {}),
            )
        return self._splits[name]

    def refuse_without_links(self) -> None:
        """Raises DataError when a run is to begin on training data without gold word links."""
        if self._trained("tokenizer"):
            return
        train = self.split("train")
        if not len(train) or "links" not in train[0]:
            raise DataError(
                f"config.loss.alignment is 'gold' but {self.config.data.name} has no gold word links;"
                " take 'latent', which needs none, or data that has them, such as greek_english"
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of both sides, or of the source when they are separate."""
        sides = ("source", "target") if self.config.tokenizer.joint else ("source",)
        return self._tokenizer("tokenizer", sides)

    @cached_property
    def target_tokenizer(self) -> Tokenizer | None:
        """Of the target; None when both sides share one."""
        if self.config.tokenizer.joint:
            return None
        return self._tokenizer("target_tokenizer", ("target",))

    @property
    def output_tokenizer(self) -> Tokenizer:
        """The one that turns generated ids into text."""
        return self.target_tokenizer or self.tokenizer

    def save(self, folder: Path) -> None:
        """Tokenizers beside the checkpoints, and their checksums."""
        files = [self.tokenizer.save(folder, "tokenizer")]
        if self.target_tokenizer is not None:
            files.append(self.target_tokenizer.save(folder, "target_tokenizer"))
        sums = {path.name: _sha256(path) for path in files}
        write_whole(folder / _SUMS, json.dumps(sums, indent=1) + "\n")

    def _trained(self, name: str) -> bool:
        """Whether the run has its tokenizer already.

        Raises:
          DataError: it has lost it, while parameters that go by its ids are there.
        """
        if self.assets is None:
            return False
        path = self.assets / f"{name}.json"
        if path.exists():
            return True
        checkpoints = self.assets.parent / "checkpoints"
        if checkpoints.is_dir() and any(step.name.isdigit() for step in checkpoints.iterdir()):
            raise DataError(
                f"{path} is missing, but {checkpoints} were trained with it; restore the file, or start"
                " over with --resume=never or in another --workdir"
            )
        return False

    def _tokenizer(self, name: str, sides: Sequence[str]) -> Tokenizer:
        if self.assets is not None and self._trained(name):
            _refuse_another(self.assets / f"{name}.json")
            return Tokenizer.load(local_copy(self.assets), name)
        train = self.split("train")
        texts = [train[i][side] for i in range(len(train)) for side in sides]
        options = self.config.tokenizer
        return train_tokenizer(texts, options.vocab_size, options.kind)


def _refuse_another(path: Folder) -> None:
    """Hold a tokenizer to the checksum that its run wrote down."""
    record = path.with_name(_SUMS)
    try:
        sums = json.loads(record.read_bytes())
        recorded = sums.get(path.name)
    except FileNotFoundError:
        _LOG.warning(
            "%s is missing, so nothing says whether %s is the run's own", record, path.name
        )
        return
    except (OSError, ValueError, RecursionError, AttributeError):
        raise DataError(
            f"{record} is damaged; restore it, or remove it to take {path.name} as it is"
        ) from None
    if recorded != _sha256(path):
        raise DataError(
            f"{path} is not the tokenizer that this run was trained with (its SHA-256 is not that in"
            f" {record}); restore the file"
        )


def _sha256(path: Folder) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
