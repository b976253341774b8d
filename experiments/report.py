"""Scores of translations, and results as a table and as JSON."""

import json
import time
from collections.abc import Mapping
from typing import Any

from crossattn.train import processes
from crossattn.train.alignment import Recipe
from crossattn.train.evaluate import translation_scores
from crossattn.train.storage import Folder, write_whole
from experiments.settings import build
from experiments.tasks.alignment import aligned_pairs, choose_recipe, score
from experiments.tasks.generation import Translator

_ALIGNED_AT_MOST = 500


def translation_results(
    task: Any, params: Any, split: str, *, num_beams: int | None = None, limit: int | None = None
) -> dict[str, Any]:
    """Returns all results of a split of sentence pairs."""
    options = {} if num_beams is None else {"num_beams": num_beams}
    translator = task.translator(params, **options)
    examples = task.some(split, limit)
    start = time.perf_counter()
    hypotheses = translator.texts([example["source"] for example in examples])
    seconds = time.perf_counter() - start
    results = {
        "split": split,
        "sentences": len(examples),
        "cut_sources": translator.cut_sources,
        "num_beams": num_beams or task.config.evaluate.decoding.num_beams,
        **translation_scores(
            hypotheses,
            [example["target"] for example in examples],
            tokenize=task.config.evaluate.bleu_tokenize,
        ),
        **{
            f"{split}_loss" if name == "loss" else name: value
            for name, value in task.split_loss(params, split).items()
        },
        **alignment_results(task, translator, split, limit),
        "decoding_seconds": seconds,
        "decoded_sentences_per_second": len(examples) / seconds,
    }
    results["samples"] = [
        {"source": e["source"], "translation": h, "reference": e["target"]}
        for e, h in zip(examples, hypotheses, strict=True)
    ]
    return results


def alignment_results(
    task: Any, translator: Translator, split: str, limit: int | None = None
) -> dict[str, Any]:
    """Returns AER, precision and recall of the config's recipe, or of one chosen on validation pairs."""
    limit = min(limit or _ALIGNED_AT_MOST, _ALIGNED_AT_MOST)
    pairs = aligned_pairs(translator, task.some(split, limit))
    if not any(pair.gold for pair in pairs):
        return {"aer": None, "alignment_recipe": "no links"}
    recipe = stated_recipe(task.config)
    if task.config.evaluate.alignment.choose:
        recipe, _ = choose_recipe(aligned_pairs(translator, task.some("validation", limit)))
    human = pairs[0].scored is None
    return {
        **score(pairs, recipe),
        "alignment_recipe": str(recipe),
        "links": "human" if human else "anchors: words spelt alike, once on either side",
        "links_count": sum(len(pair.gold) for pair in pairs),
    }


def stated_recipe(config: Any) -> Recipe:
    """Returns the recipe of the config, which reads links off attention."""
    options = config.evaluate.alignment.to_dict()
    options.pop("choose", None)
    return build(Recipe, "evaluate.alignment", options)


def save(results: Mapping[str, Any], path: Folder) -> None:
    """Writes results as JSON, in the main process."""
    if processes.is_main():
        write_whole(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def show(results: Mapping[str, Any]) -> None:
    """Prints results in two columns, in the main process."""
    if not processes.is_main():
        return
    rows = [(name, _text(value)) for name, value in results.items() if name != "samples"]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"  {name:<{width}}  {text}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
