"""Pictures of texts, drawn by a trained run.

    python -m experiments.draw --workdir=runs/draw "a red circle" --out=circle.png
    python -m experiments.draw --workdir=runs/draw "a red circle" --out=circle.png --guidance=5 --seed=3
    python -m experiments.draw --workdir=runs/draw "a red circle" --out=circle.png --plot=growth.png
    python -m experiments.draw --workdir=runs/draw "a red circle" "a blue frame" --out=x.png --gallery=all.png
    python -m experiments.draw --workdir=runs/draw "a red circle" --guidance=0 --guidance=3 --out=x.png

A text a picture, in files with their numbers if there are several. ``--guidance`` 0 ignores the text, 1
follows it and more exaggerates it; given several times, each text is drawn with each, from the same noise.
``--plot`` draws the picture as it comes out of noise, with the attention
of its patches to each word, ``--gallery`` all pictures with their texts. Scenes of shapes are read back from
the pixels. A text with words that the run has never read is refused; of several texts it does not stop the
others, and the exit code is then 1.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from crossattn import viz
from crossattn.data import scenes
from crossattn.data.errors import DataError
from crossattn.viz.writing import write_whole
from experiments import launch
from experiments.runs import MEMBER, SEED, STEP, open_run
from experiments.tasks.text_to_image import SAMPLERS, TextToImageTask, pixels
from experiments.tasks.written import words_read

_GUIDANCE = flags.DEFINE_multi_float(
    "guidance", None, "0 ignores the text, 1 follows it; default: the config's.", lower_bound=0.0
)
_SAMPLER = flags.DEFINE_enum(
    "sampler", None, sorted(SAMPLERS), "Way from noise to a picture; default: the config's."
)
_SAMPLING_STEPS = flags.DEFINE_integer(
    "sampling_steps", None, "Of that way; default: the config's.", lower_bound=1, upper_bound=1000
)
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, MEMBER, launch.OUT, _GUIDANCE, _SAMPLER, _SAMPLING_STEPS, SEED,
    launch.PLOT, launch.GALLERY,
)  # fmt: skip
_SHOWN = 256  # pixels of the longer side of a file, at least
_COLUMNS = 7  # steps of a plot


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        raise launch.Refused(
            'got no text; name some: python -m experiments.draw --workdir=RUN "a red circle" --out=x.png'
        )
    launch.need("PIL", install="crossattn[images]")
    out, drawing, page = _file(), launch.picture(), launch.picture(launch.GALLERY)
    launch.keep_compiled()
    _, task, params = open_run(TextToImageTask)
    task.check_sampler(_SAMPLER.value)
    chosen = dict(sampler=_SAMPLER.value, steps=_SAMPLING_STEPS.value)
    chosen |= dict(return_path=drawing is not None)
    drawers = {
        guidance: task.drawer(params, guidance=guidance, **chosen)
        for guidance in _GUIDANCE.value or [None]
    }
    wanted = [(text, guidance) for text in arguments for guidance in drawers]
    code, shown = 0, []
    for number, (text, guidance) in enumerate(wanted, start=1):
        ending = "" if len(wanted) == 1 else f"-{number}"
        try:
            plot = None if drawing is None else _numbered(drawing, ending)
            draw = drawers[guidance]
            large, line = _draw(task, draw, text, _numbered(out, ending), plot)
            shown.append((large, line if len(drawers) == 1 else f"{line}\nguidance {guidance:g}"))
        except DataError as error:
            if not ending:
                raise
            launch.complain(error)
            code = 1
    if page is not None and shown:
        images, texts = zip(*shown, strict=True)
        columns = len(drawers) if len(drawers) > 1 else 6
        viz.save(viz.captions(images, texts, columns=columns), page)
    return code


def _file() -> Path:
    """Returns the file of --out; raises Refused where it is missing or cannot be written."""
    if not launch.OUT.value:
        raise launch.Refused("--out is missing; name the picture's file, --out=x.png.")
    path = Path(launch.OUT.value)
    if path.suffix.lower() != ".png":
        raise launch.Refused(f"--out names {path}; expected a .png file.")
    launch.writable(path)
    return path


def _numbered(path: Path, ending: str) -> Path:
    return path.with_stem(path.stem + ending)


def _draw(
    task: Any, draw: Callable[..., Any], text: str, out: Path, drawing: Path | None
) -> tuple[np.ndarray, str]:
    """Draws a picture of a text, and perhaps how it came out of noise; returns its pixels and its line."""
    from PIL import Image

    task.refuse_unknown(text)
    found = draw([text], SEED.value)
    x = pixels(found if drawing is None else found[0])[0]
    scale = max(1, -(-_SHOWN // max(x.shape[:2])))
    large = x.repeat(scale, 0).repeat(scale, 1)
    drawn = io.BytesIO()
    Image.fromarray(large).save(drawn, "PNG")
    write_whole(out, drawn.getvalue())
    seen = " and ".join(map(_said, scenes.read(x))) if task.reads_back else ""
    line = f"{text}, read back as {seen}" if seen else text
    print(f"{out}: {line}", flush=True)
    if drawing is not None:
        viz.save(_growth(task, text, *found), drawing)
    return large / 255, line


def _said(thing: scenes.Thing) -> str:
    return f"{thing.words} at the {thing.corner}"


def _growth(
    task: Any, text: str, x: np.ndarray, path: np.ndarray, times: np.ndarray, weights: np.ndarray
) -> Any:
    """Draws pictures [steps 1 H W 3] at equal distances and the attention [steps L 1 N P S] to each word."""
    chosen = np.unique(np.linspace(0, len(path) - 1, min(_COLUMNS, len(path))).astype(int))
    ids = task.features["caption"].prepare(text).tolist()
    grid = task.grid
    maps: dict[str, list[np.ndarray]] = {}
    for step in chosen:
        read = weights[step].mean((0, 2))[0].T[: len(ids)]  # [S P]
        for word, heat in words_read(task, ids, read.reshape(-1, *grid)).items():
            maps.setdefault(word, []).append(heat)
    images = [*pixels(path[chosen[1:], 0]), pixels(x)[0]]
    # A map is of the pass that made the picture above it from the one before.
    names = [f"t = {times[step]:.2f}" for step in chosen[1:]] + ["t = 0"]
    return viz.growth(images, names, {word: np.stack(own) for word, own in maps.items()}, text)


if __name__ == "__main__":
    launch.run(main)
