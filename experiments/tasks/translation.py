"""Translation: an encoder-decoder trained on sentence pairs, scored by its translations."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import jax

from crossattn.train.alignment import Recipe
from crossattn.train.errors import MissingPackage
from crossattn.train.evaluate import translation_scores
from crossattn.types import Count, NonNegative
from experiments.errors import SettingsError
from experiments.keys import NAME_OF_PRETRAINED
from experiments.settings import section_of
from experiments.tasks import hmm, lexical, protocols, sections
from experiments.tasks.alignment import alignment_results, markup_recipe
from experiments.tasks.alignment_loss import (
    WITH_LINKS,
    TransformerWithLexicon,
    alignment_loss,
    coverage_loss,
)
from experiments.tasks.base import Sums
from experiments.tasks.copied import copied
from experiments.tasks.generation import Translator
from experiments.tasks.tags import tag_f1, tagged_pairs
from experiments.tasks.texts import TextTask

_WITH_LEXICON = ("latent", *WITH_LINKS)


@dataclass(frozen=True, kw_only=True)
class PairData(sections.PackedData):
    """Pairs of texts.

    Attributes:
      source_len: the most tokens of a source, its end included.
    """

    source_len: sections.Length


@dataclass(frozen=True)
class TranslationLoss(sections.CrossEntropy):
    """The loss of tokens, and of alignments.

    Attributes:
      alignment: loss that teaches cross-attention to align words.
      alignment_weight: of that loss.
      alignment_share: share of the examples whose alignments, human or counted, are given.
      alignment_layer: decoder layer that is taught, from 0; None is the first for "latent", else the last.
      alignment_head: head of that layer that "gold" and "hmm" teach, from 0; others teach the mean of all.
      alignment_head_weight: of the loss of that head, beside that of the first layer.
      alignment_diagonal: sharpness of the diagonal prior.
      alignment_coverage: weight of the loss of uncovered source tokens.
    """

    alignment: Literal["none", "diagonal", "latent", "gold", "hmm"]
    alignment_weight: NonNegative
    alignment_share: Annotated[float, "(0, 1]"]
    alignment_layer: int | None
    alignment_head: Annotated[int, "[0, inf)"]
    alignment_head_weight: NonNegative
    alignment_diagonal: NonNegative
    alignment_coverage: NonNegative


@dataclass(frozen=True)
class Decoding(sections.Decoding):
    """The search of translations.

    Attributes:
      length_penalty: larger favours longer texts.
      max_new_tokens: the most tokens; None is data.target_len.
      no_repeat_ngram: no sequence of so many tokens is written twice; None allows it.
    """

    length_penalty: NonNegative
    max_new_tokens: sections.Length | None
    no_repeat_ngram: Count | None = None


@dataclass(frozen=True, kw_only=True)
class AlignmentReading(Recipe):
    """The recipe that reads links off attention.

    Attributes:
      choose: choose the other alignment keys on validation pairs.
    """

    choose: bool


@dataclass(frozen=True)
class Evaluation:
    """Scoring of texts that are written about texts.

    Attributes:
      examples: validation sources about which a text is written while training; 0 is none.
    """

    examples: sections.Number
    decoding: Decoding
    alignment: AlignmentReading


@dataclass(frozen=True)
class TranslationEvaluation(Evaluation):
    """Scoring of translations.

    Attributes:
      bleu_tokenize: sacreBLEU's tokenizer, such as char or ja-mecab.
      tags: validation pairs with tags on both sides, whose tags are placed by attention while training; 0 is
        none.
    """

    bleu_tokenize: str | None
    tags: sections.Number = 0


class TranslationTask(TextTask):
    """A ``Transformer``, or another encoder-decoder, and pairs of texts.

    Attributes:
      written: name of the texts that the model writes, in the samples of ``report``.
    """

    sections = {
        "data": PairData,
        "tokenizer": sections.PairTokenizer,
        "loss": TranslationLoss,
        "evaluate": TranslationEvaluation,
    }
    metrics = (*TextTask.metrics, "bleu", "chrf", "tag_f1")
    scored = ("bleu", "chrf")
    asks = protocols.TranslationModel
    takes_pretrained = True
    memory = ("source",)
    written = "translation"

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        best = section_of(config, "checkpoint").get("best_metric")
        if best == "tag_f1" and not config.evaluate.get("tags", 0):
            raise SettingsError(
                "config.checkpoint.best_metric is 'tag_f1', which evaluate.tags of 1 or more measures; take"
                " 'loss'."
            )
        if config.loss.alignment in _WITH_LEXICON and config.model.name != "transformer":
            raise SettingsError(
                f"config.loss.alignment is {config.loss.alignment!r}, which learns a lexicon beside a"
                f" 'transformer', not beside a {config.model.name!r}; take 'diagonal' or 'none'."
            )
        if config.model.name != NAME_OF_PRETRAINED:
            _check_layers(config)
        _check_decoding(config)

    def corpus_options(self) -> dict[str, Any]:
        loss = self.config.loss
        if loss.alignment not in WITH_LINKS:
            return {}
        counted = hmm.linked if loss.alignment == "hmm" else None
        return dict(link_share=loss.alignment_share, linked=counted)

    def sizes(self) -> dict[str, Any]:
        corpus, data = self.corpus, self.config.data
        separate = corpus.target_tokenizer is not None
        return dict(
            vocab_size=corpus.output_tokenizer.vocab_size,
            source_vocab_size=corpus.tokenizer.vocab_size if separate else None,
            max_length=max(data.source_len, data.target_len),
        )

    @cached_property
    def build(self) -> Any:
        """The function that makes the module, with a lexicon where the loss needs one."""
        if self.config.loss.alignment not in _WITH_LEXICON:
            return super().build
        return lambda rngs: TransformerWithLexicon(self.model_config, rngs=rngs)

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        """Returns the cross-entropy, plus ``alignment_loss`` and ``coverage_loss`` as the config asks.

        The sum "cross_entropy" has neither of them.
        """
        model, options = self.bind(params), self.config.loss
        aligned, covered = options.alignment != "none", options.alignment_coverage > 0
        hidden, weights = self.read_source(model, batch, key, return_weights=aligned or covered)
        loss, sums = self.cross_entropy(model, hidden, batch)
        terms = []
        if weights is not None and aligned:
            alignment = alignment_loss(model, batch, weights, options)
            terms.append((options.alignment_weight, *alignment))
        if weights is not None and covered:
            terms.append((options.alignment_coverage, *coverage_loss(batch, weights, options)))
        if terms:
            sums = {**sums, "cross_entropy": sums["loss"]}
        for weight, extra, extra_sums in terms:
            loss, sums = loss + weight * extra, {**sums, **extra_sums}
        return loss, {**sums, "loss": jax.lax.stop_gradient(loss)}

    def refuse_unready(self) -> None:
        """Raises errors also of missing gold links, and as ``check_scores`` does."""
        if self.config.evaluate.examples:
            self.check_scores()
        if self.config.loss.alignment == "gold":
            self.corpus.refuse_without_links()
        if self.config.evaluate.get("tags", 0) and not tagged_pairs(self, "validation", 1):
            raise SettingsError(
                f"config.evaluate.tags is {self.config.evaluate.tags}, but {self.config.data.name} has no "
                "phrases in validation; take libreoffice_help/en-X, or 0."
            )
        super().refuse_unready()

    def check_scores(self) -> None:
        """Scores one sentence, to find missing packages and tokenizers early.

        Raises:
          SettingsError: sacreBLEU does not take ``evaluate.bleu_tokenize``.
          MissingPackage: sacreBLEU is not installed.
        """
        try:
            self.text_scores([{"target": "a"}], ["a"])
        except Exception as error:
            if isinstance(error, MissingPackage):
                raise
            raise SettingsError(
                f"config.evaluate.bleu_tokenize is {self.config.evaluate.bleu_tokenize!r}, which sacreBLEU "
                f"does not take here: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error

    def text_scores(
        self, examples: Sequence[dict[str, Any]], texts: Sequence[str]
    ) -> dict[str, Any]:
        """Returns the metrics of the texts written about examples, those of ``scored`` among them.

        "examples" may have them of each example, as ``outcomes`` does.
        """
        references = [example["target"] for example in examples]
        options = self.config.evaluate
        return dict(translation_scores(texts, references, tokenize=options.bleu_tokenize))

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Returns the loss of the validation split, and ``scored`` metrics of its first texts."""
        scores = self.split_loss(params, "validation")
        examples = self.examples("validation", self.config.evaluate.examples)
        if examples:
            hypotheses = self.translator(params).texts([e["source"] for e in examples])
            quality = self.text_scores(examples, hypotheses)
            scores |= {name: float(quality[name]) for name in self.scored}
        if count := self.config.evaluate.get("tags", 0):
            tagged = tagged_pairs(self, "validation", count)
            scores["tag_f1"] = tag_f1(self.translator(params), tagged, markup_recipe(self.config))
        return scores

    def headline_baselines(self, split: str) -> dict[str, float]:
        """Returns the nats per token of trigrams, blind and reading, without texts and their scores."""
        return super().baselines(split)

    def baselines(self, split: str) -> dict[str, float]:
        """Returns nats per token of trigrams, scores of ``simple_texts``, and AER where links are gold."""
        examples, found = self.examples(split), super().baselines(split)
        for name, texts in self.simple_texts(examples).items():
            scores = self.text_scores(examples, texts)
            found |= {f"{name}_{metric}": float(scores[metric]) for metric in self.scored}
        if all("links" in example for example in examples):
            found |= lexical.alignment_errors(self.examples, split)
        return found

    def simple_texts(self, examples: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
        """Returns texts that need no model, of each example, by the name of the baseline."""
        train = self.examples("train")
        texts = copied(train, [example["source"] for example in examples])
        return texts | {"word_by_word": lexical.word_by_word(train, examples)}

    def report(
        self, params: Any, split: str, *, num_beams: int | None = None, limit: int | None = None
    ) -> dict[str, Any]:
        """Returns the texts and their scores, the loss, and scores of word alignment."""
        self.check_scores()
        beams = num_beams or self.config.evaluate.decoding.num_beams
        translator, examples = self.translator(params, num_beams=beams), self.examples(split, limit)
        start = time.perf_counter()
        hypotheses = translator.texts([example["source"] for example in examples])
        seconds = time.perf_counter() - start
        losses = self.split_loss(params, split)
        return {
            "split": split,
            "sentences": len(examples),
            "cut_sources": translator.cut_sources,
            "num_beams": beams,
            **self.text_scores(examples, hypotheses),
            f"{split}_loss": losses.pop("loss"),
            **losses,
            **alignment_results(self, translator, split, limit),
            "decoding_seconds": seconds,
            "decoded_sentences_per_second": len(examples) / seconds,
            "samples": [
                {"source": e["source"], self.written: h, "reference": e["target"]}
                | ({"group": e["family"]} if "family" in e else {})
                for e, h in zip(examples, hypotheses, strict=True)
            ],
        }

    def translator(self, params: Any, **options: Any) -> Translator:
        """Returns a ``Translator`` with the config's decoding options, or others."""
        chosen = {**self.config.evaluate.decoding.to_dict(), **options}
        return Translator(self, params, **chosen)


def _check_layers(config: Any) -> None:
    recipe, model, loss = config.evaluate.alignment, config.model, config.loss
    taught = loss.alignment != "none" or loss.alignment_coverage > 0
    if taught and model.get("attention", "") is None:
        raise SettingsError("config.loss has a loss of attention, but model.attention is none.")
    heads = model.get("num_heads", 1)
    # A recurrent decoder attends once a token, whatever its layers.
    layers = model.get("decoder_layers", 1) if "num_heads" in model else 1
    for name, given, size, what in (
        ("loss.alignment_layer", loss.alignment_layer, layers, "layers"),
        ("loss.alignment_head", loss.alignment_head, heads, "heads"),
        ("evaluate.alignment.layer", recipe.layer, layers, "layers"),
        ("evaluate.alignment.head", recipe.head, heads, "heads"),
    ):
        if given is not None and not -size <= given < size:
            raise SettingsError(f"config.{name} is {given}; the decoder has {size} {what}, from 0.")


def _check_decoding(config: Any) -> None:
    data, asked = config.data, config.evaluate.decoding.max_new_tokens
    longest = max(data.source_len, data.target_len)
    if asked is not None and asked > longest and config.model.get("positions") == "learned":
        raise SettingsError(
            f"config.evaluate.decoding.max_new_tokens is {asked}; the table of learned positions has "
            f"{longest}, of data.source_len and data.target_len."
        )
