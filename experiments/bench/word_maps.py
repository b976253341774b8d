"""Which part of a picture the words of its caption attend to, where the parts are known.

    python -m experiments.bench.word_maps runs/captions --split=test --step=best

Attention to patches is a mean over layers and heads, and sums to 1 over the patches of a picture; the words
are those of the true captions. Two parts are known without any model: the drawing, which is opaque, and the
skin of people, the pixels that differ between emoji that differ in skin tone alone. Words that say the tone
are those that the caption of the emoji without a tone lacks. Each share of attention stands beside the share
of the area, which an even map would have, with intervals of 95 % by a bootstrap over families.
"""

import dataclasses
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crossattn.data.features import Image
from crossattn.train.storage import folder
from experiments import launch
from experiments.bench.captions import by_language
from experiments.intervals import difference, ratio
from experiments.options import Options
from experiments.runs import parameters, task_of
from experiments.tasks.captioning import CaptioningTask
from experiments.tasks.written import words_read

_TONES = {f"1F3F{digit}" for digit in "BCDEF"}
_DIFFERS = 0.1  # of a colour from 0 to 1, between two skin tones
_ROWS = 32

Maps = dict[str, np.ndarray]
"""A map of attention [h w] for each word."""


def main() -> None:
    """Measures and prints."""
    parser = Options(__doc__)
    parser.add_argument("run", help="work directory of a run of captioning of emoji")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    parser.add_argument("--step", default="last", metavar="STEP", help="a step, 'last' or 'best'")
    parser.add_argument("--limit", type=int, metavar="N", help="most pictures of a language")
    options = parser.parse_args()
    workdir = folder(options.run)
    task = task_of(workdir)
    config = task.config
    if not isinstance(task, CaptioningTask) or not config.data.name.startswith("emoji"):
        parser.error(
            f"the run in {workdir} is a {config.task} of {config.data.name}; expected a captioning of emoji."
        )
    params = parameters(task, workdir, options.step)
    for language, examples in by_language(task, options.split, options.limit).items():
        maps = word_maps(task, params, examples)
        print(f"{language or 'captions'}: {len(examples)} pictures")
        for line in drawing(task, examples, maps) + skin(task, examples, maps):
            print(f"  {line}", flush=True)


def drawing(task: Any, examples: Sequence[dict], maps: Sequence[Maps]) -> list[str]:
    """Returns lines of the attention to the opaque part of the pictures."""
    shape = next(iter(maps[0].values())).shape
    drawn = [covered(opacity(task.features["source"], e["source"]), shape) for e in examples]
    shares = [share(own, part) for own, part in zip(maps, drawn, strict=True)]
    area = {"of the area": [part.mean() for part in drawn]}
    return _lines("drawing, by all words", shares, area, examples)


def skin(task: Any, examples: Sequence[dict], maps: Sequence[Maps]) -> list[str]:
    """Returns lines of the attention to skin of words of its tone, and of other words; none without skin."""
    parts, toned = skins(task.features["source"], examples), said_tones(task, examples)
    rows = sorted(parts.keys() & toned.keys())
    if not rows:
        return []
    shape = next(iter(maps[0].values())).shape
    feature, chosen = task.features["source"], [examples[row] for row in rows]
    part = [covered(parts[row], shape) for row in rows]
    drawn = [opacity(feature, example["source"]).mean() for example in chosen]
    tone, rest = [], []
    for row, own in zip(rows, part, strict=True):
        words = {
            said: {w: x for w, x in maps[row].items() if (w in toned[row]) == said}
            for said in (True, False)
        }
        tone.append(share(words[True], own))
        rest.append(share(words[False], own))
    others = {
        "of the area": [own.mean() for own in part],
        "of the drawing": [own.mean() / whole for own, whole in zip(part, drawn, strict=True)],
        "by the other words": rest,
    }
    return [
        f"{len(rows)} pictures with a tone",
        *_lines("skin, by words of its tone", tone, others, chosen),
    ]


def share(maps: Maps, part: np.ndarray) -> float:
    """Returns the share of attention to a part [h w] of a picture, the mean over words."""
    return float(np.mean([(heat * part).sum() for heat in maps.values()]))


def _lines(
    name: str, shares: Any, others: Mapping[str, Any], examples: Sequence[dict]
) -> list[str]:
    groups, ones = [example["group"] for example in examples], np.ones(len(examples))
    found = [f"{name:<27} {ratio(shares, ones, groups)}"]
    for other, values in others.items():
        less = difference(values, shares, ones, groups)
        found.append(f"  {other:<25} {ratio(values, ones, groups)}   more than that: {less}")
    return found


def word_maps(task: Any, params: Any, examples: Sequence[dict]) -> list[Maps]:
    """Returns for each example the attention to patches of each word of its caption; a map sums to 1."""
    feature, weights, found = task.features["target"], task.read_weights(params), []
    first = 1 + (len(task.languages) > 0)
    framed = [feature.prepare(example["target"]) for example in examples]
    longest = max(map(len, framed))
    for begin in range(0, len(examples), _ROWS):
        own = examples[begin : begin + _ROWS]
        tokens = np.zeros((_ROWS, longest), np.int32)
        for row, ids in enumerate(framed[begin : begin + _ROWS]):
            tokens[row, : len(ids)] = ids
        pictures = [task.features["source"].prepare(example["source"]) for example in own]
        pictures += [pictures[0]] * (_ROWS - len(own))
        for row, read in enumerate(weights(np.stack(pictures), tokens)[: len(own)]):
            ids = framed[begin + row][first:-1]
            heat = words_read(task, list(map(int, ids)), read[first - 1 :])
            found.append({word: each / each.sum() for word, each in heat.items()})
    return found


def opacity(feature: Image, value: Any) -> np.ndarray:
    """Returns how opaque a picture is in each pixel [H W], prepared as its colours are."""
    from PIL import Image as pillow

    alpha = pillow.open(io.BytesIO(value)).convert("RGBA").getchannel("A")
    plain = dataclasses.replace(feature, channels=1, mean=(0.0,), std=(1.0,))
    return plain.prepare(alpha)[..., 0]


def skins(feature: Image, examples: Sequence[dict]) -> dict[int, np.ndarray]:
    """Returns which pixels [H W] differ between the tones of an emoji, by the examples that have one tone."""
    same: dict[str, list[int]] = defaultdict(list)
    for row, example in enumerate(examples):
        tones, rest = _code(example)
        if tones == 1:
            same[rest].append(row)
    found = {}
    for rows in same.values():
        if len(rows) > 1:
            colours = np.stack([feature.prepare(examples[row]["source"]) for row in rows])
            scale = np.array(feature.std, np.float32)
            differs = (np.ptp(colours, axis=0) * scale).max(-1) > _DIFFERS
            found |= {row: differs.astype(np.float32) for row in rows}
    return found


def said_tones(task: Any, examples: Sequence[dict]) -> dict[int, set[str]]:
    """Returns the words of each caption that the caption of its emoji without a tone lacks."""
    plain = {}
    for example in examples:
        tones, rest = _code(example)
        if not tones:
            plain[rest] = {word.strip(":,") for word in task.text_of(example).split()}
    found = {}
    for row, example in enumerate(examples):
        tones, rest = _code(example)
        words = task.text_of(example).split()
        if tones == 1 and rest in plain:
            said = {word for word in words if word.strip(":,") not in plain[rest]}
            if said and len(said) < len(set(words)):
                found[row] = said
    return found


def covered(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the share of each patch of a grid [h w] that belongs to a part [H W]."""
    h, w = shape
    H, W = part.shape
    return part.reshape(h, H // h, w, W // w).mean((1, 3))


def _code(example: dict) -> tuple[int, str]:
    """Returns the number of skin tones of an emoji, and its code points without them."""
    parts = example["id"].split("/")[0].split("-")
    rest = [part for part in parts if part not in _TONES and part != "FE0F"]
    return sum(part in _TONES for part in parts), "-".join(rest)


if __name__ == "__main__":
    launch.script(main)
