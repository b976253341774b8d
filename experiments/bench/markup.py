"""Tags that follow their words: placed by attention, in proportion, and by models that count or sample.

    python -m experiments.bench.markup runs/fr
    python -m experiments.bench.markup runs/fr --split=validation

Pairs of a run's data whose tags stand on both sides, see ``crossattn.data.tags``. The tags of the source are
placed twice. On the reference an F1 counts tags that have exactly the characters that translators gave them
(each tag has one place, so that precision and recall are equal), another one counts characters. On the run's
own translation, greedy and by the attention of its search, a tag is right if its words are those of the
translators' tag of its kind, whatever their case; a translation with other words makes all methods wrong.
All methods give weights of words to one function, ``crossattn.decode.markup.place``. IBM model 1, the HMM of
``loss.alignment=hmm``, and eflomal (``pip install eflomal``, left out where there is no command
eflomal-align) learn from the training pairs and the texts that they align, and count in processor time.
Intervals are of 95 %, by a bootstrap over files.
"""

import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crossattn.data.words import word_spans
from crossattn.decode import Capture, markup
from crossattn.train.storage import folder
from experiments import launch
from experiments.intervals import difference, ratio
from experiments.options import Options
from experiments.runs import parameters, task_of
from experiments.tasks import hmm
from experiments.tasks.alignment import markup_recipe
from experiments.tasks.lexical import ibm_model_1
from experiments.tasks.tags import right_places, tagged, tagged_pairs

Pair = tuple[list[str], list[str]]


class Weighed(NamedTuple):
    """Weights [T S] of the words of a text for those of its source, and their characters."""

    weights: np.ndarray
    source_spans: np.ndarray
    target_spans: np.ndarray


def main() -> None:
    """Places and prints."""
    parser = Options(__doc__)
    parser.add_argument("run", help="work directory of a translation")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    options = parser.parse_args()
    workdir = folder(options.run)
    task = task_of(workdir)
    config = task.config
    params, recipe = parameters(task, workdir), markup_recipe(config)
    examples = tagged_pairs(task, options.split)
    if not examples:
        parser.error(
            f"{config.data.name} has no phrases in {options.split}; take libreoffice_help/en-X."
        )
    print(f"{len(examples)} pairs, {sum(len(e['phrases']) for e in examples)} tags; {recipe}")
    marked, sources = [tagged(e) for e in examples], [e["source"] for e in examples]
    attended = task.translator(params, capture=Capture()).attended(sources)
    references = [(e["source"], e["target"]) for e in examples]
    own = [(source, text) for source, (text, _) in zip(sources, attended, strict=True)]
    read = lambda each: Weighed(  # noqa: E731
        recipe.token_weights(each.weights, len(each.target_tokens)),
        each.source_spans,
        each.target_spans,
    )
    forced = task.translator(params).attention(references)
    train = [(e["source"], e["target"]) for e in task.examples("train")]
    both = others(train, references + own)
    for name, pairs, by_attention, part in (
        ("reference", references, [read(each) for each in forced], slice(len(own))),
        ("own translation", own, [read(each) for _, each in attended], slice(len(own), None)),
    ):
        found = {"attention": by_attention} | {n: weighed[part] for n, weighed in both.items()}
        texts = [text for _, text in pairs]
        placed = {
            method: [
                markup.place(m, text, *each)
                for m, text, each in zip(marked, texts, weighed, strict=True)
            ]
            for method, weighed in found.items()
        }
        print(f"on the {name}")
        _table(placed, examples, texts, own=name != "reference")


def _table(
    placed: Mapping[str, Any], examples: Sequence[Any], texts: Sequence[str], own: bool
) -> None:
    count = np.array([len(e["phrases"]) for e in examples])
    families = [e.get("family", number) for number, e in enumerate(examples)]
    first = None
    for method, spans in placed.items():
        counts = right_words if own else right_places
        right = 100.0 * np.array(
            [counts(s, e, text) for s, e, text in zip(spans, examples, texts, strict=True)]
        )
        first = right if first is None else first
        less = difference(first, right, count, families)
        than = "" if right is first else f"; less attention: {less}"
        line = f"  {method}: F1 of tags {ratio(right, count, families)}{than}"
        if not own:
            both, either = np.sum([overlap(s, e) for s, e in zip(spans, examples, strict=True)], 0)
            line += f"; F1 of characters {100 * both / either:.1f}"
        print(line, flush=True)


def right_words(spans: Sequence[markup.Span], example: Mapping[str, Any], text: str) -> int:
    """Counts the tags around the words of the reference's tags of their kind, each of which counts once."""
    kinds, target = example["kinds"], example["target"]
    said = Counter((k, text[a:b].casefold()) for k, (a, b) in zip(kinds, spans, strict=True))
    wanted = Counter(
        (k, target[p[2] : p[3]].casefold()) for k, p in zip(kinds, example["phrases"], strict=True)
    )
    return (said & wanted).total()


def overlap(spans: Sequence[markup.Span], example: Mapping[str, Any]) -> tuple[int, int]:
    """Returns twice the characters that tags share with the reference's, and the characters of both."""
    gold = [tuple(map(int, p[2:])) for p in example["phrases"]]
    pairs = list(zip(spans, gold, strict=True))
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)
    return 2 * both, sum(a[1] - a[0] + b[1] - b[0] for a, b in pairs)


def others(
    train: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str]]
) -> dict[str, list[Weighed]]:
    """Returns the weights of methods without attention; of eflomal where it is installed."""
    found = {
        "in proportion": [proportion(*pair) for pair in pairs],
        "IBM model 1": model_1(train, pairs),
        "HMM": by_hmm(train, pairs),
    }
    return found | ({"eflomal": eflomal(train, pairs)} if shutil.which("eflomal-align") else {})


def proportion(source: str, target: str) -> Weighed:
    """Links each word of the target with the word of the source at the same share of the characters."""
    own, other = word_spans(source), word_spans(target)
    weights = np.zeros((len(other), len(own)))
    if weights.size:
        middles = other.mean(1) / len(target) * len(source)
        weights[np.arange(len(other)), np.abs(own.mean(1) - middles[:, None]).argmin(1)] = 1
    return Weighed(weights, own, other)


def model_1(train: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str]]) -> list[Weighed]:
    """Weighs words by the probability of a target word given a source word."""
    known = ibm_model_1([_words(pair) for pair in (*train, *pairs)]).probabilities
    return [
        Weighed(
            np.array([[known[s].get(t, 0.0) for s in own] for t in other]).reshape(
                len(other), len(own)
            ),
            word_spans(pair[0]),
            word_spans(pair[1]),
        )
        for pair, (own, other) in ((pair, _words(pair)) for pair in pairs)
    ]


def by_hmm(train: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str]]) -> list[Weighed]:
    """Weighs words by the geometric mean of both directions' posteriors."""
    found = hmm.align([_words(pair) for pair in (*train, *pairs)])[len(train) :]
    return [
        Weighed(np.sqrt(there * back.T), word_spans(source), word_spans(target))
        for (there, back), (source, target) in zip(found, pairs, strict=True)
    ]


def eflomal(train: Sequence[tuple[str, str]], pairs: Sequence[tuple[str, str]]) -> list[Weighed]:
    """Weighs words by the links of eflomal in both directions, one or two each."""
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place, name) for name in ("both", "there", "back")]
        lines = [" ||| ".join(map(" ".join, _words(pair))) for pair in (*train, *pairs)]
        paths[0].write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = ["eflomal-align", "-i", paths[0], "-f", paths[1], "-r", paths[2], "--overwrite"]
        subprocess.run(command, check=True, capture_output=True)
        links = [path.read_text().splitlines()[len(train) :] for path in paths[1:]]
    found = []
    for pair, *both in zip(pairs, *links, strict=True):
        own, other = word_spans(pair[0]), word_spans(pair[1])
        weights = np.zeros((len(other), len(own)))
        for link in " ".join(both).split():
            s, t = map(int, link.split("-"))
            weights[t, s] += 1
        found.append(Weighed(weights, own, other))
    return found


def _words(pair: tuple[str, str]) -> Pair:
    own, other = ([text[a:b].lower() for a, b in word_spans(text)] for text in pair)
    return own, other


if __name__ == "__main__":
    launch.script(main)
