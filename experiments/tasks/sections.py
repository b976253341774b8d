"""Sections of configs: a field is a key, see ``experiments.keys``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from crossattn.types import Count, NonNegative, Rate

Dtype = Literal["float32", "bfloat16", "float16"]
Length = Annotated[int, "[2, inf)"]
Pixels = Annotated[int, "[1, 8192]"]
"""A picture's side; the largest are as many as a file's that is read."""
Number = Annotated[int, "[0, inf)"]
Share = Annotated[float, "(0, 1)"]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Examples of one source.

    Attributes:
      name: where the data come from: phrases, files:mine.tsv, text:mine.txt.
      data_dir: where fetched data lie; None is $CROSSATTN_DATA.
      batch_size: rows of a batch; of the longest ones where mode is bucket.
      blind: trains and scores the model with its memory (source, pictures, sounds) at 0.
    """

    name: str
    data_dir: str | None = None
    batch_size: Count
    blind: bool = False


@dataclass(frozen=True, kw_only=True)
class Recordings(Data):
    """Sounds and what they say.

    Attributes:
      sound: the value of an example that is heard.
      text: the value that is written.
    """

    sound: str = "audio"
    text: str = "text"

    @classmethod
    def names(cls, data: Mapping[str, Any]) -> tuple[str, str]:
        """Returns the names of the sound and of the text in examples of a config's section ``data``."""
        return data.get("sound", cls.sound), data.get("text", cls.text)


@dataclass(frozen=True)
class Splits:
    """Splits of a dataset of tfds.

    Attributes:
      train: the split or slice to train on.
      validation: the one to evaluate on while training.
      test: the one to score at the end.
    """

    train: str = "train"
    validation: str = "validation"
    test: str = "test"


@dataclass(frozen=True, kw_only=True)
class TextData(Data):
    """Texts, or pairs of them.

    Attributes:
      reverse: exchange source and target.
      target_len: the most tokens of a target, its end included.
    """

    reverse: bool
    target_len: Length
    splits: Splits


@dataclass(frozen=True, kw_only=True)
class PackedData(TextData):
    """Texts in rows as they are.

    Attributes:
      mode: pack several examples a row, or like lengths.
      truncation: drop longer examples, or cut them.
    """

    mode: Literal["pack", "bucket"]
    truncation: Literal["drop", "cut"]


@dataclass(frozen=True, kw_only=True)
class OneSidedData(PackedData):
    """One text of each pair.

    Attributes:
      side: which side is learnt.
    """

    side: Literal["source", "target"]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pictures that a model reads.

    Attributes:
      height, width: of pictures, in pixels.
      flip: half of the pictures are mirrored in training.
      shift: the most pixels by which they are shifted in training.
      unreadable: refuse files that are no pictures, or skip them and say which, and how many.
    """

    height: Pixels
    width: Pixels
    flip: bool = False
    shift: Number = 0
    unreadable: Literal["refuse", "skip"] = "refuse"


@dataclass(frozen=True)
class Tokenizer:
    """One tokenizer.

    Attributes:
      kind: byte-pair encoding or a unigram model.
      vocab_size: the most tokens; bytes and specials take 261.
    """

    kind: Literal["bpe", "unigram"]
    vocab_size: Annotated[int, "[261, inf)"]


@dataclass(frozen=True)
class PairTokenizer(Tokenizer):
    """One tokenizer, or one for each side.

    Attributes:
      joint: one tokenizer for both sides.
      new: side whose tokenizer is trained where init.from is a run, which gives the other's; None is neither.
    """

    joint: bool = False
    new: Literal["source", "target"] | None = None


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of tokens.

    Attributes:
      label_smoothing: probability spread over the whole vocabulary.
      z_loss: weight of the squared log-normaliser.
      chunks: parts of a length whose logits are held at once.
    """

    label_smoothing: Rate
    z_loss: NonNegative
    chunks: Count


@dataclass(frozen=True)
class PlannedDecoding:
    """Decoding of a plan.

    Attributes:
      batch_size: texts that a plan decodes together.
    """

    batch_size: Count = 32


@dataclass(frozen=True)
class PlannedEvaluation:
    """Decoding of tasks that decode in a plan alone."""

    decoding: PlannedDecoding


@dataclass(frozen=True)
class Decoding:
    """The search of texts that are written.

    Attributes:
      num_beams: beams; 1 is greedy.
      batch_size: texts written together.
    """

    num_beams: Count
    batch_size: Count


@dataclass(frozen=True)
class WrittenEvaluation:
    """Texts that are written while training.

    Attributes:
      examples: validation examples of which a text is written; 0 is none.
    """

    examples: Number
    decoding: Decoding


@dataclass(frozen=True)
class PretrainedModel:
    """The keys of a checkpoint's model.

    Attributes:
      dtype: of the computation.
      remat: recompute activations in the backward pass; see ``Stack`` for policies by name.
    """

    dtype: Dtype = "float32"
    remat: bool | str = False


@dataclass(frozen=True)
class PretrainedTokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
      source_language: of an mBART: the language that is read, en_XX.
      target_language: of an mBART, fr_XX, or a Whisper, en: the language that is written.
    """

    source_language: str | None = None
    target_language: str | None = None


@dataclass(frozen=True)
class Init:
    """The parameters that a run begins with.

    Attributes:
      source: a run, a folder of weights, a name on the hub, tiny.en, tiny:t5 or pair:minilm; or several, A,B.
      step: checkpoint of a run: a step, last or best; None is last.
      take: regular expression of the parameters that are taken; None is all.
      rename: PATTERN=TEXT,...: names of its parameters in this model.
      new: regular expression of the model's parameters that begin afresh.
    """

    source: str | None = field(default=None, metadata={"name": "from"})
    step: str | None = None
    take: str | None = None
    rename: str | None = None
    new: str | None = None
