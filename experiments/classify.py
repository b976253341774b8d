"""Classes of pictures, by a trained run.

    python -m experiments.classify --workdir=runs/fashion shoe.png shirt.jpg
    python -m experiments.classify --workdir=runs/fashion shoe.png --plot=read.png

Pictures of any size and mode that Pillow reads; they are prepared as those of the run were. ``--plot`` draws
over each which patches the class token reads. Of several files one that cannot be read does not stop the
others; the exit code is then 1.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from crossattn import viz
from experiments import inputs, launch
from experiments.runs import MEMBER, STEP, open_run
from experiments.tasks.classification import ClassificationTask

FLAGS = (launch.CONFIG, launch.WORKDIR, STEP, MEMBER, launch.PLOT)
_NAMED = 3  # classes


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        raise launch.Refused(
            "got no picture; name some: python -m experiments.classify --workdir=RUN a.png"
        )
    launch.need("PIL", install="crossattn[images]")
    drawing = launch.picture()
    _, task, params = open_run(ClassificationTask)
    data = task.config.data
    if [*task.reads] != ["image"]:
        raise launch.Refused(
            f"the run reads {' and '.join(task.reads.values())}; expected one that reads pictures alone."
        )
    module = type(task.bind(params))
    if drawing is not None and not hasattr(module, "patch_weights"):
        raise launch.Refused(
            f"--plot draws the patches that a class token reads, and a {module.__name__} has none; leave it "
            "out."
        )
    feature = task.features[data.image]
    predict = jax.jit(lambda p, x: jax.nn.softmax(task.logits(p, {data.image: x})))
    read = jax.jit(lambda p, x: task.bind(p).patch_weights(x))

    def use(path: str, own: Path | None) -> None:
        x = feature.prepare(path)[None]
        probabilities = np.asarray(predict(params, x))[0]
        likeliest = np.argsort(-probabilities, kind="stable")[:_NAMED]
        line = ", ".join(f"{task.classes[i]} {probabilities[i]:.2f}" for i in likeliest)
        if own is not None:
            weights = {name: np.asarray(w)[0] for name, w in read(params, x).items()}
            picture = inputs.shown(feature, path)
            viz.save(viz.patches(picture, weights, line.partition(",")[0]), own)
        print(f"{path}: {line}", flush=True)

    return inputs.each_file(arguments, drawing, use)


if __name__ == "__main__":
    launch.run(main)
