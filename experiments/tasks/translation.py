"""Sequence to sequence: an encoder-decoder trained on sentence pairs, scored by what it generates."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax

from crossattn.train.errors import MissingPackage
from crossattn.train.evaluate import translation_scores
from experiments import keys, report
from experiments.errors import SettingsError
from experiments.keys import NAME_OF_PRETRAINED, Key, under
from experiments.tasks.alignment_loss import alignment_loss, coverage_loss
from experiments.tasks.base import Sums
from experiments.tasks.corpus import Corpus
from experiments.tasks.generation import Translator
from experiments.tasks.lexicon import TransformerWithLexicon
from experiments.tasks.texts import TextTask

_WITH_LEXICON = ("latent", "gold")

KEYS = {
    **keys.TEXT,
    **keys.SOURCE_LEN,
    **keys.BATCHES,
    "tokenizer.joint": Key(bool, "One tokenizer for both sides."),
    **under("loss", {
        "alignment": Key(str, "What teaches cross-attention to align words.",
                         choices=("none", "diagonal", "latent", "gold")),
        "alignment_weight": Key(float, "Of that loss.", "[0, inf)"),
        "alignment_share": Key(float, "Share of the examples whose gold links are given.", "(0, 1]"),
        "alignment_layer": Key(int, "Decoder layer that is taught, from 0; none is the usual.", none=True),
        "alignment_diagonal": Key(float, "How sharp the diagonal prior is.", "[0, inf)"),
        "alignment_coverage": Key(float, "Weight of the loss on sources not looked at.", "[0, inf)"),
    }),
    **under("evaluate", {
        "examples": Key(int, "Validation sentences translated while training; 0 is none.", "[0, inf)"),
        "bleu_tokenize": Key(str, "sacreBLEU's tokenizer, such as char or ja-mecab.", none=True),
        "decoding.num_beams": Key(int, "1 is greedy.", "[1, inf)"),
        "decoding.length_penalty": Key(float, "Larger favours longer texts.", "[0, inf)"),
        "decoding.max_new_tokens": Key(int, "The most tokens; none is data.target_len.", "[2, inf)",
                                       none=True),
        "decoding.batch_size": Key(int, "Sentences decoded together.", "[1, inf)"),
        "alignment.choose": Key(bool, "Choose the other alignment keys on validation pairs."),
        "alignment.layer": Key(int, "Decoder layer whose attention is read; -1 is the last."),
        "alignment.head": Key(int, "Its head; none is the mean of all.", none=True),
        "alignment.row_offset": Key(
            int, "Rows of attention after the one that predicts a token.", "[0, 2]"
        ),
        "alignment.symmetrise": Key(str, "How both directions are joined.",
                                    choices=("none", "union", "intersection", "grow-diag")),
        "alignment.unlinked": Key(bool, "A target word may stay without a link."),
        "alignment.threshold": Key(float, "Attention below which a source word stays alone.", "[0, 1]"),
    }),
}  # fmt: skip


class TranslationTask(TextTask):
    """A ``Transformer``, or another encoder-decoder, and pairs of texts."""

    metrics = (*TextTask.metrics, "bleu", "chrf")
    reads = ("source", "target_in")
    takes_pretrained = True

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        metric = config.checkpoint.best_metric
        if metric in ("bleu", "chrf") and not config.evaluate.examples:
            raise SettingsError(
                f"config.checkpoint.best_metric is {metric!r}, which only a translation with "
                "evaluate.examples of 1 or more measures; take 'loss'."
            )
        if config.loss.alignment in _WITH_LEXICON and config.model.name != "transformer":
            raise SettingsError(
                f"config.loss.alignment is {config.loss.alignment!r}, which learns a lexicon beside a"
                f" 'transformer', not beside a {config.model.name!r}; take 'diagonal' or 'none'."
            )
        if config.model.name != NAME_OF_PRETRAINED:
            _check_layers(config)
        _check_decoding(config)

    def _open(self) -> Corpus:
        options = self.config.loss
        share = options.alignment_share if options.alignment == "gold" else 0.0
        return self._corpus(link_share=share)

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
        """Makes the module, with a lexicon where the loss needs one."""
        if self.config.loss.alignment not in _WITH_LEXICON:
            return super().build
        return lambda rngs: TransformerWithLexicon(self.model_config, rngs=rngs)

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Sums]:
        """Label-smoothed cross-entropy of the targets; no key means no dropout.

        ``config.loss.alignment`` adds an ``alignment_loss``, ``alignment_coverage`` a ``coverage_loss``;
        the sum "loss" has both, "cross_entropy" neither.
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
        """Beside that: sentences that cannot be scored, and links that are not there.

        Raises:
          DataError: ``loss.alignment`` is "gold" and the data have no gold word links.
          SettingsError: sacreBLEU does not take ``evaluate.bleu_tokenize``.
          MissingPackage: sacreBLEU is not installed.
        """
        if self.config.evaluate.examples:
            check_scores(self.config)
        if self.config.loss.alignment == "gold":
            self.corpus.refuse_without_links()
        super().refuse_unready()

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Loss on the validation split, and BLEU of translations of its first sentences."""
        scores = self.split_loss(params, "validation")
        examples = self.some("validation", self.config.evaluate.examples)
        if examples:
            hypotheses = self.translator(params).texts([e["source"] for e in examples])
            quality = translation_scores(
                hypotheses,
                [e["target"] for e in examples],
                tokenize=self.config.evaluate.bleu_tokenize,
            )
            scores |= {name: float(quality[name]) for name in ("bleu", "chrf")}
        return scores

    def report(self, params: Any, split: str, **options: Any) -> dict[str, Any]:
        """Translations and their scores, the loss, and word alignment."""
        check_scores(self.config)
        return report.translation_results(self, params, split, **options)

    def translator(self, params: Any, **options: Any) -> Translator:
        """Text in, text out, with this config's decoding options unless others are given."""
        chosen = {**self.config.evaluate.decoding.to_dict(), **options}
        return Translator(self, params, **chosen)

    def some(self, split: str, count: int | None) -> Sequence[dict[str, Any]]:
        """The first ``count`` examples of a split; None for all."""
        source = self.corpus.split(split)
        return [source[i] for i in range(len(source) if count is None else min(count, len(source)))]


def _check_layers(config: Any) -> None:
    recipe, model = config.evaluate.alignment, config.model
    for name, given, size, what in (
        ("loss.alignment_layer", config.loss.alignment_layer, model.decoder_layers, "layers"),
        ("evaluate.alignment.layer", recipe.layer, model.decoder_layers, "layers"),
        ("evaluate.alignment.head", recipe.head, model.num_heads, "heads"),
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


def check_scores(config: Any) -> None:
    """Score one sentence, so that a package or tokenizer that is missing shows before hours of work.

    Raises:
      SettingsError: sacreBLEU does not take ``evaluate.bleu_tokenize``.
      MissingPackage: sacreBLEU is not installed.
    """
    tokenize = config.evaluate.bleu_tokenize
    try:
        translation_scores(["a"], ["a"], tokenize=tokenize)
    except Exception as error:
        if isinstance(error, MissingPackage):
            raise
        raise SettingsError(
            f"config.evaluate.bleu_tokenize is {tokenize!r}, which sacreBLEU does not take here: "
            f"{type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
