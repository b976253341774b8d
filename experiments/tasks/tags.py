"""Tags that translators gave to both sides of a pair, as gold of markup that attention carries."""

from collections.abc import Mapping, Sequence
from typing import Any

from crossattn.decode import markup
from crossattn.train.alignment import Recipe
from experiments.tasks.generation import Attention, Translator


def tagged_pairs(task: Any, split: str, count: int | None = None) -> list[dict[str, Any]]:
    """Returns the examples of a split that have tags on both sides, or the first ``count``."""
    found = [e for e in task.examples(split) if len(e.get("phrases", ()))]
    return found[:count]


def tag_f1(translator: Translator, examples: Sequence[Mapping[str, Any]], recipe: Recipe) -> float:
    """Returns the F1, in percent, of tags placed on references by attention: those with all characters right.

    Each tag has one place, so that precision and recall are equal.
    """
    attended = translator.attention([(e["source"], e["target"]) for e in examples])
    right = [
        right_places(placed(tagged(e), e["target"], each, recipe), e, e["target"])
        for e, each in zip(examples, attended, strict=True)
    ]
    return 100.0 * sum(right) / sum(len(e["phrases"]) for e in examples)


def placed(
    marked: markup.Marked, text: str, attention: Attention, recipe: Recipe
) -> list[markup.Span]:
    """Returns the characters of each element in a text that was read with this attention."""
    weights = recipe.token_weights(attention.weights, len(attention.target_tokens))
    return markup.place(marked, text, weights, attention.source_spans, attention.target_spans)


def tagged(example: Mapping[str, Any]) -> markup.Marked:
    """Returns the source of an example and the tags that its translation has as well."""
    spans = [(int(start), int(end)) for start, end, *_ in example["phrases"]]
    outer_first = sorted(range(len(spans)), key=lambda i: (spans[i][0], -spans[i][1]))
    elements = {}
    for row, number in enumerate(outer_first):
        (start, end), kind = spans[number], example["kinds"][number]
        around = [i for i in outer_first[:row] if spans[i][0] <= start and end <= spans[i][1]]
        parent = around[-1] if around else -1
        elements[number] = markup.Element(f"<{kind}>", f"</{kind}>", start, end, parent)
    return markup.Marked(example["source"], tuple(elements[i] for i in range(len(spans))))


def right_places(spans: Sequence[markup.Span], example: Mapping[str, Any], text: str) -> int:
    """Counts the tags that have the characters of the reference's."""
    return sum(span == tuple(p[2:]) for span, p in zip(spans, example["phrases"], strict=True))
