"""Word alignment by cross-attention, scored against human links, tagged phrases, or anchors."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crossattn.data.words import word_spans, words_of_tokens
from crossattn.train.alignment import (
    PATHS,
    ROW_OFFSETS,
    SYMMETRISE,
    Phrases,
    Recipe,
    alignment_scores,
    anchors,
    phrase_counts,
    phrase_scores,
    word_weights,
)
from experiments.intervals import Interval, ratio
from experiments.settings import build
from experiments.tasks.alignment_loss import ROW_OF_LINKS, WITH_LINKS
from experiments.tasks.generation import Attention, Translator

Links = set[tuple[int, int]]

_THRESHOLDS = (0.05, 0.1, 0.15, 0.2)
_ALIGNED_AT_MOST = 500


@dataclass(frozen=True)
class Aligned:
    """The attention and links of a sentence pair.

    Attributes:
      attention: of the reference translation.
      source_words, target_words: spans of the words.
      gold: links (source word, target word).
      scored: target words that count; None is all. Anchors say nothing about other words.
      family: of pairs that are drawn together; None is none.
    """

    attention: Attention
    source_words: np.ndarray
    target_words: np.ndarray
    gold: Links
    scored: set[int] | None
    family: str | None

    def matrix(self, recipe: Recipe) -> np.ndarray:
        """Returns the attention of target words to source words that a recipe reads, [target source]."""
        attention = self.attention
        tokens = attention.weights.shape[-2] - 1
        return word_weights(
            recipe.token_weights(attention.weights, tokens),
            words_of_tokens(attention.target_spans[:tokens], self.target_words),
            words_of_tokens(attention.source_spans, self.source_words),
            (len(self.target_words), len(self.source_words)),
        )

    def links(self, recipe: Recipe) -> Links:
        """Returns the links that a recipe reads off the attention."""
        links = recipe.links(self.matrix(recipe))
        return links if self.scored is None else {link for link in links if link[1] in self.scored}

    def errors(self, recipe: Recipe) -> tuple[int, int]:
        """Returns the numerator and the denominator of AER."""
        links = self.links(recipe)
        return len(links ^ self.gold), len(links) + len(self.gold)


@dataclass(frozen=True)
class Phrased(Aligned):
    """The attention and phrases of a sentence pair, whose words are the model's own tokens.

    Attributes:
      phrases: tokens of the source and of the target of each.
    """

    phrases: Phrases

    def errors(self, recipe: Recipe) -> tuple[int, int]:
        """Returns the numerator and the denominator of AER, see ``phrase_scores``."""
        inside, touching, covered, words = phrase_counts(self.links(recipe), self.phrases).tolist()
        return touching - inside + words - covered, touching + words


def alignment_results(
    task: Any, translator: Translator, split: str, limit: int | None = None
) -> dict[str, Any]:
    """Returns AER, precision and recall of the config's recipe, or of one chosen on validation pairs.

    Where translators tagged phrases, ``phrase_aer`` and so on are of these, with a recipe of their own.
    """
    if getattr(task.model_config, "attention", "") is None:
        return {"aer": None, "alignment_recipe": "no attention"}
    limit = min(limit or _ALIGNED_AT_MOST, _ALIGNED_AT_MOST)
    phrases = _phrase_results(task, translator, split, limit)
    pairs = aligned_pairs(translator, task.examples(split, limit))
    if not any(pair.gold for pair in pairs):
        return {"aer": None, "alignment_recipe": "no links", **phrases}
    others = lambda: aligned_pairs(translator, task.examples("validation", limit))  # noqa: E731
    recipe = _recipe(task.config, others)
    human = pairs[0].scored is None
    return {
        **score(pairs, recipe),
        **aer_interval(pairs, recipe).bounds("aer"),
        "alignment_recipe": str(recipe),
        "links": "human" if human else "anchors: words spelt alike, once on either side",
        "links_count": sum(len(pair.gold) for pair in pairs),
        "aligned_pairs": len(pairs),
        **phrases,
    }


def _phrase_results(task: Any, translator: Translator, split: str, limit: int) -> dict[str, Any]:
    """Returns AER, precision and recall against the phrases of a split; {} where there are none."""
    pairs = phrased_pairs(translator, task.examples(split), limit)
    if not pairs:
        return {}
    recipe = _recipe(
        task.config,
        lambda: phrased_pairs(translator, task.examples("validation"), limit),
        symmetrise=SYMMETRISE,
        paths=PATHS,
        also=(None,),
    )
    links, phrases = [pair.links(recipe) for pair in pairs], [pair.phrases for pair in pairs]
    found = phrase_scores(links, phrases) | aer_interval(pairs, recipe).bounds("aer")
    found |= {"recipe": str(recipe), "count": sum(map(len, phrases)), "pairs": len(pairs)}
    return {f"phrase_{name}": value for name, value in found.items()}


def _recipe(config: Any, validation: Callable[[], Sequence[Aligned]], **methods: Any) -> Recipe:
    """Returns the recipe of the config, or the one that it asks to choose on validation pairs."""
    recipe = stated_recipe(config)
    if not config.evaluate.alignment.choose or not (pairs := validation()):
        return recipe
    return choose_recipe(pairs, [recipe] if _taught(config) else None, **methods)[0]


def stated_recipe(config: Any) -> Recipe:
    """Returns the recipe of the config, which reads links off attention.

    If a head learnt gold links, "choose" reads that head, and chooses the rest alone.
    """
    options = config.evaluate.alignment.to_dict()
    choose = options.pop("choose", False)
    recipe = build(Recipe, "evaluate.alignment", options)
    if not (choose and _taught(config)):
        return recipe
    layer = config.loss.alignment_layer
    layer, head = -1 if layer is None else layer, config.loss.alignment_head
    return replace(recipe, layer=layer, head=head, row_offset=ROW_OF_LINKS)


def markup_recipe(config: Any) -> Recipe:
    """Returns the recipe by which tags follow words: a head that learnt links, or the mean of all."""
    return stated_recipe(config) if _taught(config) else Recipe(layer=None)


def _taught(config: Any) -> bool:
    return config.loss.alignment in WITH_LINKS


def aligned_pairs(translator: Translator, examples: Sequence[dict[str, Any]]) -> list[Aligned]:
    """Returns attention and links of examples; without human links, anchors take their place."""
    attentions = translator.attention([(e["source"], e["target"]) for e in examples])
    return [_aligned(a, e) for a, e in zip(attentions, examples, strict=True)]


def _aligned(attention: Attention, example: dict[str, Any]) -> Aligned:
    if "links" in example:
        gold = {(int(s), int(t)) for s, t in example["links"]}
        words = example["source_spans"], example["target_spans"]
        return Aligned(attention, *words, gold, None, example.get("family"))
    spans = [word_spans(example[side]) for side in ("source", "target")]
    words = [
        [example[side][start:end] for start, end in own]
        for side, own in zip(("source", "target"), spans, strict=True)
    ]
    gold = anchors(*words)
    scored = {t for _, t in gold}
    return Aligned(attention, spans[0], spans[1], gold, scored, example.get("family"))


def phrased_pairs(
    translator: Translator, examples: Sequence[dict[str, Any]], limit: int = _ALIGNED_AT_MOST
) -> list[Phrased]:
    """Returns attention and phrases of the first examples that have some in what the model reads."""
    tagged = [e for e in examples if len(e.get("phrases", ()))][:limit]
    if not tagged:
        return []
    attentions = translator.attention([(e["source"], e["target"]) for e in tagged])
    pairs = [_phrased(a, e) for a, e in zip(attentions, tagged, strict=True)]
    return [pair for pair in pairs if pair.phrases]


def _phrased(attention: Attention, example: dict[str, Any]) -> Phrased:
    source, target = attention.source_spans, attention.target_spans[:-1]

    def inside(spans: np.ndarray, start: int, end: int) -> set[int]:
        return set(np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > start)).tolist())

    found = [(inside(source, *p[:2]), inside(target, *p[2:])) for p in example["phrases"]]
    read = [p for p in found if p[0] and p[1]]
    return Phrased(attention, source, target, set(), None, example.get("family"), read)


def score(pairs: Sequence[Aligned], recipe: Recipe) -> dict[str, float]:
    """Returns AER, precision and recall of a recipe, in percent."""
    return alignment_scores([p.links(recipe) for p in pairs], [p.gold for p in pairs])


def aer_interval(pairs: Sequence[Aligned], recipe: Recipe) -> Interval:
    """Returns AER in percent with its interval, by a bootstrap over families, without any over sentences."""
    wrong, links = np.array([pair.errors(recipe) for pair in pairs], np.float64).T
    families = [pair.family for pair in pairs]
    return ratio(100.0 * wrong, links, None if None in families else families)


def choose_recipe(
    pairs: Sequence[Aligned],
    recipes: Iterable[Recipe] | None = None,
    symmetrise: Sequence[str] = ("none", "grow-diag"),
    paths: Sequence[str] = ("argmax",),
    also: Sequence[None] = (),
) -> tuple[Recipe, float]:
    """Returns the recipe with the lowest AER on validation pairs, and its AER.

    Args:
      pairs: the validation pairs.
      recipes: layers, heads and rows to choose from; None is all. They link every word at first.
      symmetrise, paths: methods to choose from.
      also: (None,) offers the mean of all layers beside each.
    """
    layers, heads = pairs[0].attention.weights.shape[:2]
    if recipes is None:
        numbers = (*range(layers), *also)
        places = itertools.product(numbers, (None, *range(heads)), ROW_OFFSETS)
        recipes = [Recipe(*place) for place in places]
    best = (Recipe(), float("inf"))
    for recipe in recipes:
        best = _better(best, recipe, pairs)
    for unlinked in (False, True):
        best = _better(best, replace(best[0], unlinked=unlinked), pairs)
    for method, path in itertools.product(symmetrise, paths):
        best = _better(best, replace(best[0], symmetrise=method, path=path), pairs)
    if best[0].symmetrise != "none":
        for threshold in _THRESHOLDS:
            best = _better(best, replace(best[0], threshold=threshold), pairs)
    return best


def _better(best: tuple[Recipe, float], recipe: Recipe, pairs: Sequence[Aligned]):
    wrong, links = np.sum([pair.errors(recipe) for pair in pairs], 0)
    aer = 100.0 * float(wrong) / max(float(links), 1.0)
    return (recipe, aer) if aer < best[1] else best
