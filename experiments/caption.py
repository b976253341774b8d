"""Captions of pictures, by a trained run.

    python -m experiments.caption --workdir=runs/captions cat.png rocket.png
    python -m experiments.caption --workdir=runs/captions cat.png --language=de --num_beams=4
    python -m experiments.caption --workdir=runs/captions cat.png --plot=read.png
    python -m experiments.caption --workdir=runs/captions *.png --gallery=all.png

A line a picture. Pictures of any size and mode that Pillow reads; they are prepared as those of the run were.
A run of ``captioning``, or one of ``interleaved`` whose model reads pictures, a Flamingo or a LLaVA.
``--language`` is one that the run was told, the first of them where it is left out. ``--plot`` draws over
each picture which patches each word read, ``--gallery`` all pictures with their captions. Of several files
one that cannot be read does not stop the others; the exit code is then 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crossattn import viz
from experiments import inputs, launch
from experiments.runs import MEMBER, NUM_BEAMS, STEP, open_run
from experiments.tasks.captioning import CaptioningTask
from experiments.tasks.interleaved import InterleavedTask
from experiments.tasks.written import words_read
from experiments.transcribe import LANGUAGE

FLAGS = (
    launch.CONFIG,
    launch.WORKDIR,
    STEP,
    MEMBER,
    LANGUAGE,
    NUM_BEAMS,
    launch.PLOT,
    launch.GALLERY,
)


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        raise launch.Refused(
            "got no picture; name some: python -m experiments.caption --workdir=RUN a.png"
        )
    launch.need("PIL", install="crossattn[images]")
    launch.keep_compiled()
    drawing, page = launch.picture(), launch.picture(launch.GALLERY)
    _, task, params = open_run(CaptioningTask, InterleavedTask)
    prompt = np.array([task.prompt_in(language_of(task, LANGUAGE.value))], np.int32)
    writer, weights = task.writer(params, NUM_BEAMS.value), task.read_weights(params)
    feature, shown = task.features["source"], {}

    def use(path: str, own: Path | None) -> None:
        x = feature.prepare(path)[None]
        ids = writer(x, prompt)[0]
        text = task.decoded(ids.tolist())
        print(f"{path}: {text}", flush=True)
        if own is not None or page is not None:
            shown[path] = inputs.shown(feature, path), text
        if own is not None:
            read = weights(x, np.concatenate([prompt, ids[None]], 1))[0, prompt.shape[1] - 1 :]
            words = words_read(task, ids.tolist(), read)
            viz.save(viz.patches(shown[path][0], words, text), own)

    code = inputs.each_file(arguments, drawing, use)
    if page is not None and shown:
        images, texts = zip(*shown.values(), strict=True)
        viz.save(viz.captions(images, texts), page)
    return code


def language_of(task: Any, chosen: str | None) -> str | None:
    """Returns the chosen language, or the first of the run; refuses one that the run lacks."""
    if chosen is None:
        return next(iter(task.languages), None)
    if chosen not in task.languages:
        told = ", ".join(task.languages) or "none, so leave it out"
        raise launch.Refused(f"--language is {chosen!r}; the run was told {told}.")
    return chosen


if __name__ == "__main__":
    launch.run(main)
