"""Captioning: a model reads a picture and writes its caption, in the language that it is told.

If ``config.data.languages`` names languages, the decoder reads ``<s> <language>`` before the caption, and the
loss counts the tokens after these two. With ``config.data.row_len``, a training row has all captions of a
picture, each a segment, and the model reads the picture once.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from crossattn.data.errors import Unreadable
from crossattn.data.features import Image, PackedTexts, TaggedText, Text
from crossattn.data.sources import MappedSource, items_of
from crossattn.interventions import sites
from crossattn.train.evaluate import caption_scores
from crossattn.types import Count
from experiments.errors import SettingsError
from experiments.keys import NAME_OF_PRETRAINED
from experiments.tasks import readers, sections
from experiments.tasks.augmentation import augmented_as
from experiments.tasks.base import Sums, feature_batch, shapes_of
from experiments.tasks.generation import without_each_head
from experiments.tasks.texts import TextTask
from experiments.tasks.written import WritesText, WrittenData

_SCORES = ("bleu", "chrf", "cider")
_COPIED = ("nearest_picture", "most_frequent")
_BLOCK = 256  # training pictures in memory at a time


@dataclass(frozen=True, kw_only=True)
class CaptioningData(sections.Pictures, WrittenData):
    """Pictures with captions.

    Attributes:
      languages: of the captions, en,de: values of `language`; None tells no language.
      row_len: tokens of a training row with all captions of a picture; None gives each caption a row and a
        picture of its own.
    """

    languages: str | None
    row_len: Count | None = None


class CaptioningTask(WritesText):
    """A ``VisionEncoderDecoder``, and examples {"id", "image", "caption"}, perhaps with a "language".

    Scores are means over the languages; ``report`` also has those of each.
    """

    sections = WritesText.sections | {"data": CaptioningData, "tokenizer": sections.Tokenizer}
    gives = (*WritesText.gives, "image_size")
    metrics = (*TextTask.metrics, *_SCORES)
    scored = _SCORES
    measured = "captions"
    takes_pretrained = True
    read = "pictures"

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises SettingsError also for repeated languages, and for languages of a checkpoint."""
        super().check(config)
        if (chosen := config.data.languages) is None:
            return
        languages = chosen.split(",")
        if "" in languages or len(set(languages)) < len(languages):
            raise SettingsError(
                f"config.data.languages is {chosen!r}; expected distinct names, en,de, or none."
            )
        if config.model.name == NAME_OF_PRETRAINED:
            raise SettingsError(
                f"config.data.languages is {chosen!r}, for which a pretrained model has no tokens; take none."
            )

    def corpus_options(self) -> dict[str, Any]:
        return dict(side="caption", whole=True)

    def refuse_unready(self) -> None:
        """Raises DataError where examples lack a value, and MissingPackage without packages of scores."""
        if self.config.evaluate.examples:
            caption_scores(["a"], ["a"])
        told = ["language"] if self.languages else []
        self.corpus.refuse_lacking("image", "caption", *told)

    @cached_property
    def languages(self) -> tuple[str, ...]:
        """The languages that the model is told; () is none."""
        chosen = self.config.data.languages
        return () if chosen is None else tuple(chosen.split(","))

    @cached_property
    def features(self) -> dict[str, Any]:
        """The features of a picture, and of its caption, which begins with the language."""
        data, tokenizer = self.config.data, self.corpus.tokenizer
        text: Text = Text(tokenizer, data.target_len, predicted=True)
        if self.languages:
            text = TaggedText(tokenizer, data.target_len + 1, True, self.languages)
        chosen = self._prepared() | {"unreadable": data.get("unreadable", "refuse")}
        return {"source": Image(data.height, data.width, **chosen), "target": text}

    def trained(self) -> tuple[Sequence[Any], dict[str, Any]]:
        packed = self.config.data.get("row_len") is not None
        return self._by_picture() if packed else self.examples("train"), self._of_rows

    @property
    def _of_rows(self) -> dict[str, Any]:
        """The features of training, where a row may have several captions of a picture."""
        row_len = self.config.data.get("row_len")
        packed = {"target": PackedTexts(self.features["target"], row_len)} if row_len else {}
        return self.features | packed

    def batch_shapes(self, multiple: int) -> dict[str, jax.ShapeDtypeStruct]:
        return shapes_of(feature_batch(self._of_rows, self.config.data.batch_size))

    def _by_picture(self) -> Sequence[dict[str, Any]]:
        """Groups the renamed training examples by picture, one caption of each language in a group."""
        every = self.examples("train")
        rows: dict[Any, dict[str | None, int]] = {}
        for index in range(len(every)):
            example, again = every[index], 0
            picture = example["source"]
            if isinstance(picture, np.ndarray):
                picture = picture.tobytes()
            if isinstance(picture, bytes):
                picture = hashlib.sha256(picture).digest()
            language = example["target"][0] if self.languages else None
            while language in rows.setdefault((picture, again), {}):
                again += 1
            rows[picture, again][language] = index

        def together(own: list[int]) -> dict[str, Any]:
            read = items_of(every, own)
            return read[0] | {"target": [example["target"] for example in read]}

        return MappedSource([list(own.values()) for own in rows.values()], together)

    def _prepared(self) -> dict[str, Any]:
        """Returns the options of ``Image`` that a checkpoint was trained with."""
        if self.checkpoint is None:
            return {}
        said = json.loads(self.checkpoint.files.get("preprocessor_config.json", b"{}"))
        names = {"mean": "image_mean", "std": "image_std"}
        return {"resize": "stretch"} | {k: tuple(said[n]) for k, n in names.items() if n in said}

    def sizes(self) -> dict[str, Any]:
        data, told = self.config.data, len(self.languages)
        return dict(
            vocab_size=self.corpus.tokenizer.vocab_size + told,
            max_length=data.target_len + (told > 0),
            image_size=(data.height, data.width),
        )

    def examples(self, split: str, count: int | None = None) -> Sequence[dict[str, Any]]:
        """Returns the renamed examples of a split; or ``count``, the first of each language in turn."""
        every = super().examples(split)
        if count is None or not self.languages:
            return super().examples(split, count)
        found: dict[str, list] = {name: [] for name in self.languages}
        share = -(-count // len(found))
        for example in every:
            own = found.get(example["target"][0])
            if own is not None and len(own) < share:
                own.append(example)
            if all(len(own) == share for own in found.values()):
                break
        chosen = [example for own in found.values() for example in own]
        return chosen[:count]

    def renamed(self, example: dict[str, Any]) -> dict[str, Any]:
        caption = example["caption"]
        target = (example.get("language"), caption) if self.languages else caption
        group = example.get("family", example["id"])
        return {"id": example["id"], "group": group, "source": example["image"], "target": target}

    def text_of(self, example: dict[str, Any]) -> str:
        return example["target"][1] if self.languages else example["target"]

    def prompts(
        self, examples: Sequence[dict[str, Any]], indices: Sequence[int]
    ) -> list[list[int]]:
        if not self.languages:
            return super().prompts(examples, indices)
        return [self.prompt_in(examples[index]["target"][0]) for index in indices]

    def prompt_in(self, language: str | None) -> list[int]:
        """Returns the prompt of the decoder: the start, and the language's token."""
        feature = self.features["target"]
        frame = feature.frame(language) if self.languages else self.corpus.tokenizer.frame
        return [frame.start, *frame.before]

    def told(self, batch: Any) -> Any:
        told = super().told(batch)
        return told & (batch["target_positions"] > 0) if self.languages else told

    def decoded(self, ids: list[int]) -> str:
        """Returns the text of tokens, without the language."""
        first = self.corpus.tokenizer.vocab_size
        return super().decoded([id for id in ids if not self.languages or id < first])

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        image = augmented_as(self.config.data, batch["source"], key)
        return super().loss(params, {**batch, "source": image}, key)

    def text_scores(
        self, examples: Sequence[dict[str, Any]], texts: Sequence[str]
    ) -> dict[str, float]:
        """Returns BLEU, chrF and CIDEr: the means over languages, then the scores of each."""
        right = [self.text_of(example) for example in examples]
        if not self.languages:
            return caption_scores(texts, right)
        said, own = [example["target"][0] for example in examples], {}
        for language in [name for name in self.languages if name in said]:
            rows = [row for row, name in enumerate(said) if name == language]
            own[language] = caption_scores([texts[i] for i in rows], [right[i] for i in rows])
        means = {name: float(np.mean([x[name] for x in own.values()])) for name in _SCORES}
        return means | {f"{n}_{lang}": x for lang, each in own.items() for n, x in each.items()}

    def headline_baselines(self, split: str) -> dict[str, float]:
        """Returns the nats per token of trigrams, blind and seeing, without captions and their scores."""
        return super().baselines(split)

    def source_of_text(self, batch: Any, row: int, number: int) -> np.ndarray:
        """Returns the pixels of a row, which a baseline reads."""
        return readers.thumbnail(batch["source"][row])

    def baselines(self, split: str) -> dict[str, float]:
        """Returns scores of trigrams, and of the captions of ``copied``."""
        found, examples = super().baselines(split), self.readable(self.examples(split))
        for name, captions in self.copied(examples).items():
            scores = self.text_scores(examples, captions)
            found |= {f"{name}_{metric}": score for metric, score in scores.items()}
        return found

    def readable(self, examples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the examples whose pictures can be read."""
        return [each for each in examples if self._pixels(each["source"]) is not None]

    def copied(self, examples: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
        """Returns captions [n] of training pictures for n examples, each in the language of the example.

        They are those of the picture nearest in L2 distance of prepared pixels, and the most frequent ones,
        the first of those that are equally frequent.
        """
        train = self.examples("train")
        found: dict[str, list[str]] = {name: [""] * len(examples) for name in _COPIED}
        for language, own in self._captions.items():
            rows = [i for i, each in enumerate(examples) if self._language(each) == language]
            if not rows:
                continue
            pictures, texts = [examples[row]["source"] for row in rows], list(own.values())
            nearest = self._nearest(pictures, MappedSource(list(own), train.__getitem__))
            frequent = Counter(texts).most_common(1)[0][0]
            for row, index in zip(rows, nearest, strict=True):
                for name, text in zip(_COPIED, (texts[index], frequent), strict=True):
                    found[name][row] = text
        return found

    @cached_property
    def _captions(self) -> dict[str | None, dict[int, str]]:
        """The training captions of each language, by the indices of their examples."""
        found: dict[str | None, dict[int, str]] = {}
        for index, example in enumerate(self.examples("train")):
            found.setdefault(self._language(example), {})[index] = self.text_of(example)
        return found

    def _language(self, example: dict[str, Any]) -> str | None:
        return example["target"][0] if self.languages else None

    def _nearest(self, pictures: Sequence[Any], examples: Sequence[dict[str, Any]]) -> list[int]:
        """Returns the index [n] of the readable example whose picture is nearest, for n pictures."""
        given: list[Any] = [self._pixels(each) for each in pictures]
        asked, known = np.stack(given), len(examples)
        best, chosen = np.full(len(asked), np.inf), np.zeros(len(asked), np.int64)
        for first in range(0, known, _BLOCK):
            indices = range(first, min(first + _BLOCK, known))
            read = {i: self._pixels(examples[i]["source"]) for i in indices}
            read = {i: pixels for i, pixels in read.items() if pixels is not None}
            if not read:
                continue
            block = np.stack(list(read.values()))
            far = (asked**2).sum(1)[:, None] - 2 * asked @ block.T + (block**2).sum(1)
            nearer = far.min(1) < best
            chosen[nearer] = np.array(list(read))[far.argmin(1)[nearer]]
            best = np.minimum(best, far.min(1))
        return chosen.tolist()

    def _pixels(self, picture: Any) -> np.ndarray | None:
        """Returns a prepared picture as one vector; None of one that cannot be read and is skipped."""
        try:
            return self.features["source"].prepare(picture).ravel()
        except Unreadable:
            return None

    def head_weights(self, params: Any) -> Callable[[Any, Any], np.ndarray]:
        """Returns a function from pictures [B H W C] and tokens [B T] to patches' weights [L B N T-1 h w]."""
        read, patches = super().head_weights(params), self.bind(params).encoder.patches

        def weights(source: Any, tokens: Any) -> np.ndarray:
            found = read(source, tokens)[..., patches.tokens :]
            return found.reshape(*found.shape[:4], *patches.grid(source.shape[1:3]))

        return weights

    def without_heads(self, params: Any) -> Callable[[Any, Any], Any]:
        """Returns ``without_each_head`` as a function of pictures and tokens, [1 + L N B T-1] each."""

        def without(p: Any, source: Any, tokens: Any) -> Any:
            logits = lambda model: model.logits(model.hidden(source, tokens[:, :-1])[0])  # noqa: E731
            model = self.bind(p)
            [site] = [name for name in sites(model) if name.endswith(".cross.heads")]
            return without_each_head(model, site, logits, tokens[:, 1:])

        call = jax.jit(without)
        return lambda source, tokens: jax.device_get(call(params, source, tokens))
