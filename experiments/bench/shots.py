"""Captions after examples: what stands in a row, what the model writes, and the patches that it reads.

    python -m experiments.bench.shots runs/flamingo --step=best --plot=shots.png
    python -m experiments.bench.shots runs/flamingo --step=best --limit=24 --rows 11 6 23 --plot=shots.png

Rows end in the pictures that ``experiments.evaluate --limit`` scores, in its order, each after as many
examples as a row of the run has, with which it shares no family. Each line has the true captions of the
examples, the caption that greedy search writes after them, the one without examples, and the true one.
``--plot`` draws the rows, and over the last picture the attention of the written caption to its patches,
the mean over its tokens, heads and layers that ``patch_weights`` of the model gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from crossattn.data.features.interleaved import interleaved
from crossattn.train.storage import folder
from experiments import launch
from experiments.inputs import shown
from experiments.options import Options
from experiments.runs import parameters, task_of
from experiments.tasks.interleaved import InterleavedTask

_SHADE = 0.65  # of the colours over a picture


@dataclass(frozen=True)
class Shots:
    """A row of pictures, whose last one is captioned by a model.

    Attributes:
      images: files or bytes of the pictures, the examples' first.
      told: captions of the examples.
      written: caption of the last picture after the examples.
      alone: its caption without examples.
      right: its true caption.
    """

    images: Sequence[Any]
    told: Sequence[str]
    written: str
    alone: str
    right: str


def main() -> None:
    """Prints and draws."""
    parser = Options(__doc__)
    parser.add_argument("run", help="work directory of a run of interleaved that reads pictures")
    parser.add_argument("--split", default="test", metavar="NAME", help="validation or test; test")
    parser.add_argument("--step", default="last", metavar="STEP", help="a step, 'last' or 'best'")
    parser.add_argument("--limit", default=6, type=int, metavar="N", help="rows to write; 6")
    parser.add_argument(
        "--rows", type=int, nargs="+", metavar="N", help="numbers of those to draw; all"
    )
    parser.add_argument("--plot", metavar="FILE", help="a .png, .svg or .pdf to draw")
    options = parser.parse_args()
    parser.needs("matplotlib", install="crossattn[viz]")
    if options.limit < 1:
        parser.error(f"--limit is {options.limit}; expected 1 or more.")
    if options.plot and Path(options.plot).suffix.lower() not in launch.FORMATS:
        parser.error(f"--plot names {options.plot}; expected one of {', '.join(launch.FORMATS)}.")
    workdir = folder(options.run)
    task = task_of(workdir)
    config = task.config
    if not isinstance(task, InterleavedTask) or not task.memory:
        parser.error(
            f"the run in {workdir} is a {config.task} of {config.model.name}; expected an interleaved whose "
            "model reads pictures."
        )
    count = min(options.limit, len(task.examples(options.split)))
    chosen = options.rows or range(1, count + 1)
    if wrong := [number for number in chosen if not 1 <= number <= count]:
        parser.error(f"--rows has {wrong[0]}; expected numbers from 1 to {count}.")
    params = parameters(task, workdir, options.step)
    rows = written_after(task, params, options.split, options.limit)
    for number, row in enumerate(rows, 1):
        told = "; ".join(row.told)
        print(f"{number}. {told} | {row.written} | alone: {row.alone} | right: {row.right}")
    if options.plot:
        from crossattn import viz

        shown = [rows[number - 1] for number in chosen if number <= len(rows)]
        viz.save(drawn(task, params, shown), options.plot)


def written_after(task: Any, params: Any, split: str, limit: int) -> list[Shots]:
    """Returns rows of the scored examples of a split, with what the model writes of their last picture."""
    count, rows = task.config.data.examples - 1, task.rows(split)
    alone = task.texts(params, split, 0, limit)
    found = []
    for last, written in task.texts(params, split, count, limit).items():
        row = rows.row([*rows.before(last, count), last])
        *told, right = row["target"]
        found.append(Shots(row["images"], told, written, alone[last], right))
    return found


def reader(task: Any, params: Any) -> Callable[[Shots], Float[np.ndarray, "h w"]]:
    """Returns a function from a row to the attention of its written caption to the last picture's patches.

    It is the mean over the tokens of the caption's text; an empty one is the step that ends it.
    """
    feature, picture = task.features["target"], task.features["source"]
    image_tokens = len(task.prompt_in(None)) - 1
    weights = jax.jit(lambda p, tokens, given: task.bind(p).patch_weights(tokens, **given))

    def read(row: Shots) -> Float[np.ndarray, "h w"]:
        texts = np.zeros((1, len(row.images), feature.max_length), np.int32)
        for place, text in enumerate([*row.told, row.written]):
            ids = feature.prepare(text)
            texts[0, place, : len(ids)] = ids
        batch = interleaved(texts, image_tokens)
        images = np.stack([picture.prepare(image) for image in row.images])[None]
        given = task.seen({"images": images, "image_positions": batch["image_positions"]})
        steps = np.flatnonzero(batch["shots"][0] == len(row.told))  # that predict the last caption
        found = weights(params, batch["target_in"], given)
        return np.asarray(found)[0, steps[:-1] if len(steps) > 1 else steps, -1].mean(0)

    return read


def drawn(task: Any, params: Any, rows: Sequence[Shots]) -> Any:
    """Draws the rows: examples with their captions, the last picture with what was written, what it read."""
    from crossattn import viz

    images, texts, read = list[np.ndarray](), list[str](), reader(task, params)
    for row in rows:
        images += [shown(task.features["source"], image) for image in row.images]
        last, heat = images[-1], read(row)
        images.append(shaded(last, heat))
        texts += [*row.told, f"“{row.written}”\nalone: “{row.alone}”\nright: {row.right}"]
        texts.append(f"read: 0 to {heat.max():.2f}")
    return viz.captions(images, texts, columns=len(rows[0].images) + 1)


def shaded(
    image: Float[np.ndarray, "H W C"], heat: Float[np.ndarray, "h w"]
) -> Float[np.ndarray, "H W 3"]:
    """Returns a picture under the colours of a map of its patches, from 0 to the largest of the map."""
    import matplotlib

    height, width = image.shape[0] // heat.shape[0], image.shape[1] // heat.shape[1]
    colours = matplotlib.colormaps["inferno"](heat / (heat.max() or 1.0))[..., :3]
    over = np.repeat(np.repeat(colours, height, 0), width, 1)
    return (1 - _SHADE) * image + _SHADE * over


if __name__ == "__main__":
    launch.script(main)
