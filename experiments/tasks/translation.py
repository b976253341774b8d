"""Sequence to sequence: an encoder-decoder trained on sentence pairs, scored by what it generates."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from crossattn import functional
from crossattn.data.pipeline import eval_batches
from crossattn.models import Transformer
from crossattn.train.evaluate import loss_scores, translation_scores
from crossattn.train.linear_loss import linear_cross_entropy
from crossattn.train.sharding import mesh_of, row_shares, rows_on, spread_batch
from crossattn.train.storage import Folder
from experiments.settings import transformer_config
from experiments.tasks.alignment_loss import alignment_loss, coverage_loss
from experiments.tasks.corpus import Corpus
from experiments.tasks.generation import Translator
from experiments.tasks.lexicon import TransformerWithLexicon

_SEGMENTS = ("source_segments", "target_segments")
_POSITIONS = ("source_positions", "target_positions")
# Schemes that see distances alone. Within a segment, places in the row give these too, and one bias for all
# rows takes their number times less memory than one for each.
_DISTANCES = ("relative", "alibi")


class TranslationTask:
    """The ``Task`` of the training loop for a ``Transformer``."""

    def __init__(self, config: Any, assets: Folder | None = None):
        self.config = config
        gold = config.loss.alignment == "gold"
        share = config.loss.alignment_share * gold
        self.corpus = Corpus(config, assets, link_share=share)
        if gold:
            self.corpus.refuse_without_links()
        self._eval_sums = jax.jit(lambda params, batch: self.loss(params, batch, None)[1])

    @cached_property
    def model_config(self):
        """The model's shape; needs the tokenizers for its vocabulary."""
        corpus, data = self.corpus, self.config.data
        target = corpus.target_tokenizer
        return transformer_config(
            self.config.model,
            corpus.output_tokenizer.vocab_size,
            None if target is None else corpus.tokenizer.vocab_size,
            max(data.source_len, data.target_len),
        )

    def build(self, rngs) -> Transformer:
        """The module; with a lexicon where the loss needs one."""
        needs_lexicon = self.config.loss.alignment in ("latent", "gold")
        kind = TransformerWithLexicon if needs_lexicon else Transformer
        return kind(self.model_config, rngs=rngs)

    @cached_property
    def _build(self):
        return lambda rngs: self.build(rngs)

    def bind(self, params: Any) -> Transformer:
        """The module holding ``params``."""
        return functional.bind(self._build, params)

    def init(self, key: jax.Array) -> Any:
        return functional.init(self._build, key)

    def logical_axes(self) -> Any:
        return functional.logical_axes(self._build)

    def loss(self, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, dict]:
        """Label-smoothed cross-entropy of the targets; no key means no dropout.

        ``config.loss.alignment`` adds an ``alignment_loss``, ``alignment_coverage`` a ``coverage_loss``;
        the sum "loss" has both, "cross_entropy" neither.
        """
        model, options = self.bind(params), self.config.loss
        near = self.config.model.positions in _DISTANCES
        aligned = options.get("alignment", "none") != "none"
        covered = options.get("alignment_coverage", 0.0) > 0
        hidden, weights = model.hidden(
            batch["source"],
            batch["target_in"],
            **{name: batch[name] for name in (_SEGMENTS if near else _SEGMENTS + _POSITIONS)},
            key=key,
            return_weights=aligned or covered,
        )
        real = batch["target_segments"] > 0
        smooth = dict(label_smoothing=options.label_smoothing, chunks=options.chunks)
        loss, sums = linear_cross_entropy(
            hidden, model.output_table(), batch["target_out"], real, z_loss=options.z_loss, **smooth
        )
        terms = []
        if weights is not None and aligned:
            found = alignment_loss(model, batch, weights, options)
            terms.append((options.alignment_weight, *found))
        if weights is not None and covered:
            terms.append((options.alignment_coverage, *coverage_loss(batch, weights, options)))
        if terms:
            sums = {**sums, "cross_entropy": sums["loss"]}
        for weight, extra, extra_sums in terms:
            loss, sums = loss + weight * extra, {**sums, **extra_sums}
        return loss, {**sums, "loss": jax.lax.stop_gradient(loss)}

    def train_iterator(self, shard_index: int, shard_count: int):
        return self.corpus.train_iterator(shard_index, shard_count)

    def save_assets(self, directory: Path) -> None:
        self.corpus.save(directory)

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """Loss on the validation split, and BLEU of greedy translations of its first sentences."""
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

    def split_loss(self, params: Any, split: str) -> dict[str, float]:
        """Loss, perplexity and token accuracy without dropout, where the parameters lie."""
        data, mesh = self.config.data, mesh_of(params)
        batches = eval_batches(
            self.corpus.split(split),
            self.corpus.tokenizer,
            target_tokenizer=self.corpus.target_tokenizer,
            rows=rows_on(mesh, data.rows),
            source_len=data.source_len,
            target_len=data.target_len,
            rows_multiple=row_shares(mesh),
        )
        return loss_scores(summed(self._eval_sums, params, batches))

    def translator(self, params: Any, **options: Any) -> "Translator":
        """Text in, text out, with this config's decoding options unless others are given."""
        chosen = {**self.config.evaluate.decoding.to_dict(), **options}
        return Translator(self, params, **chosen)

    def some(self, split: str, count: int | None) -> Sequence[dict[str, Any]]:
        """The first ``count`` examples of a split; None for all."""
        source = self.corpus.split(split)
        return [source[i] for i in range(len(source) if count is None else min(count, len(source)))]


def summed(function: Any, params: Any, batches: Any) -> dict[str, float]:
    """The sums of all batches; every process has them all, and its devices compute their rows."""
    total: dict[str, float] = {}
    mesh = mesh_of(params)
    for item in batches:
        # One by one: programs that add up over several CPU devices deadlock when they overlap.
        sums = jax.device_get(function(params, spread_batch(item.batch, mesh)))
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total
