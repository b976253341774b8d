"""What heads of a translator do, and what gold alignments do: order, scatter, how many to how many.

    python -m experiments.bench.patterns runs/fr --plot=patterns.png
    python -m experiments.bench.patterns --plot=gold.png

A row is a head of a run, on sentence pairs of its validation split read with their translations, or gold: the
links of Greek-English and of ``phrases``, and consonants of English words with the phoneme that they
usually have (cmudict), where each stands once in its word; or the links that an HMM counts on the help in
several languages (``loss.alignment=hmm``), but for Japanese, which parts no words. A column is a pattern of
``crossattn.analysis.patterns``: its mean over sentences, and the share of sentences in which it is one half
or more. Heads are read in words, as gold is, at the row offset of ``config.evaluate.alignment``; a head that
learnt links at that of the links.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crossattn.analysis.patterns import PATTERNS, of_links, patterns
from crossattn.data.sources import items_of, open_source
from crossattn.train.alignment import Recipe
from crossattn.train.storage import folder
from experiments import launch
from experiments.options import Options
from experiments.runs import parameters, task_of
from experiments.tasks.alignment import Aligned, aligned_pairs, stated_recipe
from experiments.tasks.hmm import linked

_SENTENCES = 200
_GOLD = ("greek_english/el-en", *(f"phrases/en-{name}" for name in ("fr", "es", "de", "hi", "ja")))
_COUNTED, _PAIRS = ("fr", "es", "de", "hi"), 8000  # languages; pairs that are counted on
_CONSONANTS = {letter: letter.upper() for letter in "bdfklmnprstvz"}


def main() -> None:
    """Measures and prints."""
    parser = Options(__doc__)
    parser.add_argument("runs", nargs="*", help="work directories of translations")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the table into a .png, .svg or .pdf file"
    )
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {}
    for run in options.runs:
        rows |= of_run(run)
    for name in _GOLD:
        rows[f"gold {name}"] = _patterns(of_source(name))
    for name in _COUNTED:
        rows[f"HMM help/en-{name}"] = _patterns(of_counted(f"libreoffice_help/en-{name}"))
    rows["gold letters, phonemes"] = _patterns(of_letters())
    print(f"{'':<28}" + "".join(f"{name:>20}" for name in PATTERNS))
    table = {name: summary(own) for name, own in rows.items()}
    for name, values in table.items():
        cells = "".join(f"{mean:>12.2f} ({share:4.0%})" for mean, share in values)
        print(f"{name:<28}{cells}", flush=True)
    if options.plot:
        draw(table, options.plot)


def summary(found: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Returns mean and share of one half or more of each pattern, of sentences where it has a value."""
    columns = ([each[name] for each in found if np.isfinite(each[name])] for name in PATTERNS)
    return [(float(np.mean(x)), float(np.mean(np.array(x) >= 0.5))) for x in columns]


def of_run(run: str) -> dict[str, list[dict[str, float]]]:
    """Returns the patterns of each sentence by each head of a run."""
    workdir = folder(run)
    task = task_of(workdir)
    examples = task.examples("validation", _SENTENCES)
    pairs = aligned_pairs(task.translator(parameters(task, workdir)), examples)
    heads = of_heads(pairs, task.config).items()
    return {f"{workdir.name} layer {layer} head {head}": own for (layer, head), own in heads}


def of_heads(
    pairs: Sequence[Aligned], config: Any
) -> dict[tuple[int, int], list[dict[str, float]]]:
    """Returns the patterns of each sentence pair, in words, by (layer, head)."""
    stated, usual = stated_recipe(config), config.evaluate.alignment.row_offset
    layers, heads = pairs[0].attention.weights.shape[:2]
    found = {}
    for layer, head in np.ndindex(layers, heads):
        learnt = stated.layer in (layer, layer - layers) and stated.head == head
        recipe = Recipe(layer, head, stated.row_offset if learnt else usual)
        found[layer, head] = _patterns(pair.matrix(recipe) for pair in pairs)
    return found


def _patterns(alignments: Iterable[np.ndarray]) -> list[dict[str, float]]:
    return [patterns(weights) for weights in alignments]


def of_source(name: str) -> Iterator[np.ndarray]:
    """Yields the gold alignments of the first validation pairs."""
    source = open_source(name, "validation")
    for e in items_of(source, range(min(len(source), _SENTENCES))):
        yield of_links(e["links"].tolist(), len(e["target_spans"]), len(e["source_spans"]))


def of_counted(name: str) -> Iterator[np.ndarray]:
    """Yields the alignments of the first validation pairs that an HMM counts on them and training pairs."""
    examples = []
    for split, count in (("validation", _SENTENCES), ("train", _PAIRS)):
        source = open_source(name, split)
        examples += items_of(source, range(min(len(source), count)))
    for e in linked(examples)[:_SENTENCES]:
        yield of_links(e["links"].tolist(), len(e["target_spans"]), len(e["source_spans"]))


def of_letters() -> Iterator[np.ndarray]:
    """Yields alignments of letters and phonemes of words, where three or more are certain."""
    source = open_source("cmudict", "validation")
    for e in items_of(source, range(len(source))):
        letters, phonemes = e["source"].replace(" ", ""), e["target"].split()
        links = [
            (letters.index(letter), phonemes.index(phoneme))
            for letter, phoneme in _CONSONANTS.items()
            if letters.count(letter) == phonemes.count(phoneme) == 1
        ]
        if len(links) >= 3:
            yield of_links(links, len(phonemes), len(letters))


def draw(table: Mapping[str, Sequence[tuple[float, float]]], path: str) -> None:
    """Draws the means as colours, and the shares as numbers."""
    from crossattn import viz
    from crossattn.viz.figure import Picture

    figure = Picture()
    figure.set_size_inches(7.5, 1.2 + 0.32 * len(table))
    axes = figure.subplots()
    means = np.array([[mean for mean, _ in row] for row in table.values()])
    axes.imshow(means, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, values in enumerate(table.values()):
        for column, (mean, share) in enumerate(values):
            colour = "white" if mean > 0.6 else "black"
            text = f"{mean:.2f}\n{share:.0%}"
            axes.text(
                column,
                row,
                text.replace("\n", "   "),
                ha="center",
                va="center",
                color=colour,
                size=8,
            )
    axes.set_xticks(range(len(PATTERNS)), [name.replace("_", " ") for name in PATTERNS])
    axes.set_yticks(range(len(table)), list(table))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    viz.save(figure, Path(path))


if __name__ == "__main__":
    launch.script(main)
