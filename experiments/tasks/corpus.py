"""The text side of a task: sources by split, tokenizers kept with the run, and batches to train on.

Parameters mean nothing under another tokenizer, so a run writes down the SHA-256 of
those that it was trained with, and none is read, or trained anew, in their place. A small corpus is tokenised
in memory at every start; a large one is prepared once, see ``crossattn.data.prepare``.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from crossattn.data.errors import DataError
from crossattn.data.pairs import ANY_LENGTH, pair_examples, pair_features
from crossattn.data.pipeline import train_batches
from crossattn.data.prepare import (
    PreparedCorpus,
    is_prepared,
    keep_tokenizer,
    open_prepared,
    prepare,
    prepared_dir,
)
from crossattn.data.prepared import Prepared, prepare_examples
from crossattn.data.sources import identity, open_source
from crossattn.data.tokenizers import Tokenizer, train_tokenizer
from crossattn.train.sharding import row_shares
from crossattn.train.storage import Folder, local_copy, write_whole
from experiments.pretrained import Checkpoint, UnreadVocabulary
from experiments.tasks.placement import config_mesh

_LOG = logging.getLogger(__name__)
_SUMS = "sha256.json"
_IN_MEMORY = 50_000
"""Examples that take a few seconds to tokenise; more of them are prepared."""
_SAMPLE = 200_000
"""Examples that a tokenizer learns from; of more, as many in equal distances."""


class Corpus:
    """Sources and tokenizers of ``config.data`` and ``config.tokenizer``.

    Args:
      config: the whole config.
      assets: folder of a run whose tokenizers are used; None, or an empty one, trains them.
      side: what is trained on, as ``pair_features`` has it.
      link_share: of the examples with gold links, those whose links are in the batches.
      whole: texts are kept however long they are; ``config.data`` need not say what becomes of long ones.
    """

    def __init__(
        self,
        config: Any,
        assets: Folder | None = None,
        *,
        side: str = "both",
        link_share: float = 0.0,
        whole: bool = False,
    ):
        self.config = config
        self.assets = assets
        self._side, self._link_share, self._whole = side, link_share, whole
        self._splits: dict[str, Sequence[dict[str, Any]]] = {}

    def split(self, name: str) -> Sequence[dict[str, Any]]:
        """The examples of "train", "validation" or "test"."""
        if name not in self._splits:
            self._splits[name] = open_source(self.config.data.name, **self._opening(name))
        return self._splits[name]

    def _opening(self, split: str) -> dict[str, Any]:
        data = self.config.data
        return dict(
            split=data.get("splits", {}).get(split, split),
            data_dir=data.get("data_dir"),
            reverse=data.get("reverse", False),
            **data.get("options", {}),
        )

    def train_iterator(self, process_index: int, process_count: int) -> Any:
        """Batches of the training split without end, for one of the processes that train together."""
        data = self.config.data
        return train_batches(
            self.train_pairs(),
            mode=data.mode,
            batch_size=data.batch_size,
            seed=self.config.seed,
            process_index=process_index,
            process_count=process_count,
            batch_multiple=row_shares(config_mesh(self.config)),
        )

    def train_pairs(self) -> Prepared:
        """The training split as tokens, in memory or on disk."""
        corpus = self._prepared
        if not is_prepared(corpus):
            if len(self.split("train")) <= _IN_MEMORY:
                return self._linked(self.pairs("train"))
            prepare(corpus)
        return self._linked(open_prepared(corpus))

    def pairs(self, split: str) -> Prepared:
        """A split as tokens, in memory."""
        corpus = self._prepared
        examples = pair_examples(self.split(split), self._side, "links" in corpus.features)
        return prepare_examples(examples, corpus.features, corpus.truncation)

    def prepare(self, workers: int | None = None) -> tuple[Prepared, Path]:
        """Tokenise the training split once and for all starts; the pairs, and the folder they are in."""
        for name in self._sides:
            if not self._trained(name):
                self._keep(name)
        folder = prepare(self._prepared, workers)
        return self._linked(open_prepared(self._prepared)), folder

    def _linked(self, pairs: Prepared) -> Prepared:
        share = self._link_share
        return pairs.with_links(share, self.config.seed) if share else pairs

    @cached_property
    def _prepared(self) -> PreparedCorpus:
        data = self.config.data
        features = pair_features(
            self.tokenizer,
            self.target_tokenizer,
            source_len=ANY_LENGTH if self._whole else data.get("source_len", data.target_len),
            target_len=ANY_LENGTH if self._whole else data.target_len,
            side=self._side,
            links=self._link_share > 0,
        )
        truncation = "cut" if self._whole else data.truncation
        return PreparedCorpus(data.name, features, self._opening("train"), truncation, self._side)

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
        """Of both sides, of the source when they are separate, or of the one side that is learnt."""
        return self._tokenizer("tokenizer")

    @cached_property
    def target_tokenizer(self) -> Tokenizer | None:
        """Of the target; None when there is one tokenizer."""
        return self._tokenizer("target_tokenizer") if "target_tokenizer" in self._sides else None

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

    @property
    def _sides(self) -> dict[str, tuple[str, ...]]:
        """The texts that each tokenizer learns from."""
        if self._side != "both" and "joint" not in self.config.tokenizer:
            return {"tokenizer": (self._side,)}
        if self.config.tokenizer.get("joint"):
            return {"tokenizer": ("source", "target")}
        return {"tokenizer": ("source",), "target_tokenizer": ("target",)}

    def _tokenizer(self, name: str) -> Tokenizer:
        """The run's own, the one that was kept for this corpus, or a new one."""
        if self.assets is not None and self._trained(name):
            _refuse_another(self.assets / f"{name}.json")
            return Tokenizer.load(local_copy(self.assets), name)
        kept = self._kept(name)
        if kept.exists():
            return Tokenizer.load(kept.parent, kept.stem)
        if len(self.split("train")) > _IN_MEMORY:
            return self._keep(name)
        return self._train(name)

    def _train(self, name: str) -> Tokenizer:
        options, train = self.config.tokenizer, self.split("train")
        count = min(len(train), _SAMPLE)
        examples = (train[i * len(train) // count] for i in range(count))
        values = (example[side] for example in examples for side in self._sides[name])
        texts = [
            text for value in values for text in ([value] if isinstance(value, str) else value)
        ]
        return train_tokenizer(texts, options.vocab_size, options.kind)

    def _keep(self, name: str) -> Tokenizer:
        """Train a tokenizer that all starts and processes on this corpus share."""
        return keep_tokenizer(self._kept(name), lambda: self._train(name))

    def _kept(self, name: str) -> Path:
        options = self.config.tokenizer
        known = identity(self.config.data.name, **self._opening("train"))
        named = [known, options.kind, options.vocab_size, self._sides[name], _SAMPLE]
        key = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
        folder = prepared_dir(self.config.data.get("data_dir")) / "tokenizers"
        return folder / f"{key}.json"


class PretrainedCorpus(Corpus):
    """Sources under the tokenizers of a checkpoint, which the run keeps whole.

    Args:
      checkpoint: with its tokenizers.
    """

    def __init__(self, config: Any, checkpoint: Checkpoint, **options: Any):
        super().__init__(config, **options)
        self.checkpoint = checkpoint

    @property
    def _sides(self) -> dict[str, tuple[str, ...]]:
        return {}

    def _tokenizer(self, name: str) -> Tokenizer:
        return self.checkpoint.tokenizer

    @cached_property
    def target_tokenizer(self) -> Tokenizer | None:
        """That of the checkpoint's target, where it has one of its own and there is a source."""
        return self.checkpoint.target_tokenizer if self._side == "both" else None

    def save(self, folder: Path) -> None:
        """All of the checkpoint but its weights."""
        self.checkpoint.save(folder)


class UnreadCorpus:
    """The corpus of a config of which only the sizes of the vocabularies are known: no text is read."""

    def __init__(self, config: Any):
        # As the config asks; a tokenizer that is trained on little text comes out smaller.
        self.tokenizer = self.output_tokenizer = UnreadVocabulary(config.tokenizer.vocab_size)
        self.target_tokenizer = None if config.tokenizer.get("joint", True) else self.tokenizer


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
