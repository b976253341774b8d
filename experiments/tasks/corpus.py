"""The corpus of a task: examples by split, tokenizers of the run, and training batches.

A run saves the SHA-256 of its tokenizers and refuses others in their place. A small corpus is tokenised in
memory at every start; a large one is prepared once, see ``crossattn.data.prepare``.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from crossattn.data.errors import DataError
from crossattn.data.pairs import ANY_LENGTH, pair_examples, pair_features
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
from crossattn.train.storage import Folder, local_copy, write_whole
from crossattn.train.storage import folder as storage_folder
from experiments.pretrained import Checkpoint, UnreadVocabulary

Examples = Sequence[dict[str, Any]]

_LOG = logging.getLogger(__name__)
_SUMS = "sha256.json"
_IN_MEMORY = 50_000
"""The most examples that are tokenised in memory, in a few seconds."""
_SAMPLE = 200_000
"""The most examples that a tokenizer learns from; of more, as many at equal distances."""


class Corpus:
    """Sources and tokenizers of ``config.data`` and ``config.tokenizer``.

    Args:
      config: the whole config.
      assets: folder of a run with tokenizers; None, or an empty one, trains them.
      side: the side that is learnt, see ``pair_features``.
      link_share: share of the examples with links whose links are in the batches.
      linked: gives examples links of its own, in place of those of the data.
      whole: keep texts of any length.
    """

    def __init__(
        self,
        config: Any,
        assets: Folder | None = None,
        *,
        side: str = "both",
        link_share: float = 0.0,
        linked: Callable[[Examples], Examples] | None = None,
        whole: bool = False,
    ):
        self.config = config
        self.assets = assets
        self._side, self._link_share, self._whole = side, link_share, whole
        self._linked_by = linked
        self._splits: dict[str, Examples] = {}

    def split(self, name: str) -> Examples:
        """Returns the examples of "train", "validation" or "test"."""
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

    def train_pairs(self) -> Prepared:
        """Returns the training split as tokens, in memory or on disk."""
        corpus = self._prepared
        if self._linked_by is not None:
            return self._linked(self._counted)
        if not is_prepared(corpus):
            if len(self.split("train")) <= _IN_MEMORY:
                return self._linked(self.pairs("train"))
            prepare(corpus)
        return self._linked(open_prepared(corpus))

    def pairs(self, split: str) -> Prepared:
        """Returns a split as tokens, in memory."""
        return self._tokenised(self.split(split))

    def _tokenised(self, examples: Examples) -> Prepared:
        corpus = self._prepared
        values = pair_examples(examples, self._side, "links" in corpus.features)
        return prepare_examples(values, corpus.features, corpus.truncation)

    @cached_property
    def _counted(self) -> Prepared:
        """The training split with links of its own, which are counted once for all seeds."""
        train = self.split("train")
        if len(train) > _IN_MEMORY:
            raise DataError(
                f"config.loss.alignment counts links in memory, of {_IN_MEMORY:,} pairs at most;"
                f" {self.config.data.name} has {len(train):,}; take 'latent'"
            )
        return self._tokenised(self._linked_by(train))

    def prepare(self, workers: int | None = None) -> tuple[Prepared, Path]:
        """Tokenises the training split for all starts; returns the pairs and their folder."""
        if self._linked_by is not None:
            raise DataError(
                "config.loss.alignment counts links at each start, which are not prepared; take 'gold'"
                " or 'latent' to prepare this corpus"
            )
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

    def refuse_lacking(self, *names: str) -> None:
        """Raises DataError where there is no validation split, or its examples lack one of these values."""
        examples = self.split("validation")
        if missing := [name for name in names if len(examples) and name not in examples[0]]:
            raise DataError(
                f"examples of {self.config.data.name} hold {', '.join(examples[0])}; this task reads "
                f"{missing[0]!r}"
            )

    def refuse_without_links(self) -> None:
        """Raises DataError where a new run's training data have no gold word links."""
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
        """The tokenizer of both sides; of the source, if there are two; or of the one side that is learnt."""
        return self._tokenizer("tokenizer")

    @cached_property
    def target_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the target; None where there is one tokenizer."""
        return self._tokenizer("target_tokenizer") if "target_tokenizer" in self._sides else None

    @property
    def output_tokenizer(self) -> Tokenizer:
        """The tokenizer of generated ids."""
        return self.target_tokenizer or self.tokenizer

    def save(self, folder: Path) -> None:
        """Writes the tokenizers and their checksums."""
        files = [self.tokenizer.save(folder, "tokenizer")]
        if self.target_tokenizer is not None:
            files.append(self.target_tokenizer.save(folder, "target_tokenizer"))
        sums = {path.name: _sha256(path) for path in files}
        write_whole(folder / _SUMS, json.dumps(sums, indent=1) + "\n")

    def _trained(self, name: str) -> bool:
        """Whether the run has its tokenizer; raises DataError where it has checkpoints and no tokenizer."""
        if self.assets is None or self._is_new(name):
            return False
        path = self.assets / f"{name}.json"
        if path.exists():
            return True
        if self._begins_from is not None:
            raise DataError(
                f"config.tokenizer.new is {self.config.tokenizer.new!r}, so the other side's is that of"
                f" {self._begins_from}, which lacks {path.name}; begin from a run with tokenizer.joint=False"
            )
        checkpoints = self.assets.parent / "checkpoints"
        if checkpoints.is_dir() and any(step.name.isdigit() for step in checkpoints.iterdir()):
            raise DataError(
                f"{path} is missing, but {checkpoints} were trained with it; restore the file, or start"
                " over with --resume=never or in another --workdir"
            )
        return False

    @property
    def _begins_from(self) -> str | None:
        """The run whose assets these are, where it gives one of two tokenizers to a run that begins."""
        source = (self.config.get("init", {}).get("from") or "").partition(",")[0]
        if not self.config.get("tokenizer", {}).get("new") or not source:
            return None
        return source if self.assets == storage_folder(source) / "assets" else None

    def _is_new(self, name: str) -> bool:
        """Whether a run that begins from another trains this tokenizer."""
        new = self.config.get("tokenizer", {}).get("new")
        return self._begins_from is not None and self._sides[name] == (new,)

    @property
    def _sides(self) -> dict[str, tuple[str, ...]]:
        """The sides that each tokenizer learns from."""
        if self._side != "both" and "joint" not in self.config.tokenizer:
            return {"tokenizer": (self._side,)}
        if self.config.tokenizer.get("joint"):
            return {"tokenizer": ("source", "target")}
        return {"tokenizer": ("source",), "target_tokenizer": ("target",)}

    def _tokenizer(self, name: str) -> Tokenizer:
        """Returns the run's tokenizer, the shared one of this corpus, or a new one."""
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
        """Trains a tokenizer that all starts and processes on this corpus share."""
        return keep_tokenizer(self._kept(name), lambda: self._train(name))

    def _kept(self, name: str) -> Path:
        options = self.config.tokenizer
        known = identity(self.config.data.name, **self._opening("train"))
        named = [known, options.kind, options.vocab_size, self._sides[name], _SAMPLE]
        key = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
        folder = prepared_dir(self.config.data.get("data_dir")) / "tokenizers"
        return folder / f"{key}.json"


class PretrainedCorpus(Corpus):
    """A corpus with the tokenizers of a checkpoint."""

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
        """The checkpoint's tokenizer of the target, if it has one and there is a source."""
        return self.checkpoint.target_tokenizer if self._side == "both" else None

    def save(self, folder: Path) -> None:
        """Writes the whole checkpoint but its weights."""
        self.checkpoint.save(folder)


class UnreadCorpus:
    """The vocabulary sizes of a corpus that is not read."""

    def __init__(self, config: Any):
        # As the config asks; a tokenizer that is trained on little text comes out smaller.
        self.tokenizer = self.output_tokenizer = UnreadVocabulary(config.tokenizer.vocab_size)
        self.target_tokenizer = None if config.tokenizer.get("joint", True) else self.tokenizer


def _refuse_another(path: Folder) -> None:
    """Raises DataError where a tokenizer has another checksum than that of its run."""
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
