"""Whether the pictures that a run draws show their captions, by a captioner that has not learnt from these.

    python -m experiments.bench.drawn runs/emoji runs/captions --guidance=0 --guidance=1 --guidance=3

A picture of each caption of the split is drawn. For each caption its picture is ranked among all that are
drawn, by the likelihood of the caption given each, ties counted against it. Beside them are chance, the true
pictures in the same size, and what a search would find: of each caption the training picture whose caption
shares the greatest part of its letters in threes. Intervals of 95 % are a bootstrap over families.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crossattn.train.storage import folder
from experiments import launch
from experiments.bench import captions
from experiments.options import Options
from experiments.runs import parameters, task_of
from experiments.tasks.captioning import CaptioningTask
from experiments.tasks.text_to_image import TextToImageTask, pixels

_AMONG = 10


def main() -> None:
    """Draws, ranks and prints."""
    parser = Options(__doc__)
    parser.add_argument("run", help="work directory of a run of text_to_image")
    parser.add_argument("captioner", help="work directory of a run of captioning")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    parser.add_argument(
        "--step", default="last", metavar="STEP", help="of the run: a step, 'last' or 'best'"
    )
    parser.add_argument("--language", default="en", metavar="NAME", help="of the captioner; en")
    parser.add_argument("--limit", type=int, metavar="N", help="most captions")
    parser.add_argument(
        "--guidance", type=float, action="append", metavar="X", help="several times; the config's"
    )
    options = parser.parse_args()
    drawer, captioner = (task_of(folder(name)) for name in (options.run, options.captioner))
    if not isinstance(drawer, TextToImageTask):
        parser.error(
            f"the run in {options.run} is a {drawer.config.task}; expected a text_to_image."
        )
    if not isinstance(captioner, CaptioningTask):
        parser.error(
            f"the run in {options.captioner} is a {captioner.config.task}; expected a captioning."
        )
    groups = captions.by_language(captioner, options.split, options.limit)
    chosen = options.language if captioner.languages else ""
    if chosen not in groups:
        parser.error(f"the captioner has no language {chosen!r}; expected one of {sorted(groups)}.")
    examples = groups[chosen]
    if not examples:
        parser.error(f"no caption is left by --limit={options.limit}; expected 1 or more.")
    texts = [captioner.text_of(example) for example in examples]
    known = {example["caption"] for example in drawer.examples(options.split)}
    if others := set(texts) - known:
        parser.error(
            f"{len(others)} captions of {options.captioner} ({captioner.config.data.name}), such as"
            f" {min(others)!r}, are not in the {options.split} split of {options.run}"
            f" ({drawer.config.data.name}), which may have trained on them."
        )
    params = parameters(drawer, folder(options.run), options.step)
    judge = parameters(captioner, folder(options.captioner))
    chance = captions.chance_among(_AMONG, len(texts))
    print(f"{len(texts)} captions; among the first {_AMONG} by chance {chance:.3f}")
    feature = drawer.features["image"]
    train = captions.by_language(captioner, "train")[chosen]
    nearest = most_similar(texts, [captioner.text_of(example) for example in train])
    shown = {"true pictures": examples, "similar captions": [train[index] for index in nearest]}
    for name, those in shown.items():
        small = [pixels(feature.prepare(example["source"])) for example in those]
        _print(name, captioner, judge, examples, small)
    for guidance in options.guidance or [drawer.config.evaluate.guidance]:
        found = drawer.draw(params, texts, guidance=guidance)
        _print(f"guidance {guidance:g}", captioner, judge, examples, list(found))


def most_similar(texts: Sequence[str], known: Sequence[str]) -> list[int]:
    """Returns for each text the index of the known one of greatest Jaccard index, of letters in threes."""
    spelled = [_threes(text) for text in known]

    def nearest(own: set[str]) -> int:
        shared = [len(own & other) / len(own | other) for other in spelled]
        return int(np.argmax(shared))

    return [nearest(_threes(text)) for text in texts]


def _threes(text: str) -> set[str]:
    return {text[i : i + 3] for i in range(max(len(text) - 2, 1))}


def _print(
    name: str, captioner: Any, params: Any, examples: Sequence[dict], found: Sequence[np.ndarray]
) -> None:
    shown = [{**each, "source": own} for each, own in zip(examples, found, strict=True)]
    ranks = captions.ranks_of(captioner, params, shown)
    share = captions.found_among(_AMONG, ranks, [each["group"] for each in examples])
    print(f"{name:<16}  {share}   median rank {np.median(ranks):g}", flush=True)


if __name__ == "__main__":
    launch.script(main)
