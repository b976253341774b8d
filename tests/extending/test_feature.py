"""A task with an image feature and a data source of one's own, by files alone: trained and evaluated."""

import itertools
import json

import pytest

from .test_task import MODEL

SOURCE = '''
"""Squares in one of four corners of a picture."""

import numpy as np

from crossattn.data.sources import MappedSource, Option

FORM = "SOURCE/SIDE"
OPTIONS = {"size": Option(int, "Training examples.", "[1, inf)")}
CLASSES = {"corner": ("upper left", "upper right", "lower left", "lower right")}


def open_split(side, split, *, data_dir=None, size=200):
    def example(index):
        picture, half, corner = np.zeros((int(side), int(side)), np.uint8), int(side) // 2, index % 4
        top, left = divmod(corner, 2)
        picture[top * half :, left * half :][:half, :half] = 100 + index % 100
        return {"id": str(index), "image": picture, "corner": CLASSES["corner"][corner]}

    return MappedSource(range(size if split == "train" else 20), example)
'''
TASK = '''
"""What a picture shows: one class each."""

import jax
import jax.numpy as jnp

from crossattn.data import sources
from crossattn.data.features import Image, Label
from crossattn.data.pipeline import feature_batches, feature_eval_batches
from crossattn.train.sharding import row_shares, rows_on
from experiments.keys import Key
from experiments.tasks import base

KEYS = {
    "data.name": Key(str, "Where the pictures come from."),
    "data.batch_size": Key(int, "Rows of a batch.", "[1, inf)"),
}


class PicturesTask(base.Task):
    metrics = ("loss", "accuracy")
    reads = ("x",)

    def __init__(self, config, assets=None):
        super().__init__(config, assets)
        classes = sources.classes_of(config.data.name)["corner"]
        self.features = {"image": Image(4, 4, channels=1), "corner": Label(classes)}

    def sizes(self):
        return {"inputs": 16, "outputs": 4}

    def train_iterator(self, index, count):
        return feature_batches(
            sources.open_source(self.config.data.name), self.features, mode="pad",
            batch_size=self.config.data.batch_size,
            seed=self.config.seed, process_index=index, process_count=count,
        )

    def eval_batches(self, split, mesh):
        rows, shares = rows_on(mesh, self.config.data.batch_size), row_shares(mesh)
        source = sources.open_source(self.config.data.name, split)
        batches = feature_eval_batches(source, self.features, batch_size=rows, batch_multiple=shares)
        return (item.batch for item in batches)

    def loss(self, params, batch, key):
        x = batch["image"].reshape(len(batch["image"]), -1)
        logits, here = self.bind(params).hidden(x), batch["valid"].astype(jnp.float32)
        nll = -jax.nn.log_softmax(logits)[jnp.arange(len(x)), batch["corner"]] * here
        right = (logits.argmax(-1) == batch["corner"]) * here
        sums = {"loss": nll.sum(), "accuracy": right.sum(), "weight": here.sum()}
        return nll.sum(), jax.lax.stop_gradient(sums)
'''
CONFIG = """
from ml_collections import ConfigDict

from configs import parts


def get_config(arg=""):
    return ConfigDict(
        dict(
            task="seen{n}.pictures",
            seed=0,
            data=dict(name="seen{n}.corners/8", batch_size=8),
            model=dict(name="seen{n}.two_layer_net", wide=16),
            optim=parts.adamw(learning_rate=1e-2, warmup_steps=1),
            mesh=parts.mesh(),
            train=parts.train(steps=30, log_every=10),
            checkpoint=parts.checkpoint(every=15, best_metric="accuracy"),
        )
    )
"""
_NUMBERS = itertools.count()


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """The flag of a config whose task, model and data are files in a folder on the import path."""
    number = next(_NUMBERS)
    folder = tmp_path / f"seen{number}"
    folder.mkdir()
    model = MODEL.replace("inputs: int = 4", "inputs: int = 4\n    outputs: int = 2")
    (folder / "two_layer_net.py").write_text(model.replace("wide, 2,", "wide, config.outputs,"))
    (folder / "pictures.py").write_text(TASK)
    (folder / "corners.py").write_text(SOURCE.replace("SOURCE", f"seen{number}.corners"))
    (tmp_path / "config.py").write_text(CONFIG.replace("{n}", str(number)))
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"--config={tmp_path / 'config.py'}"


def test_pictures_are_learnt_and_every_one_is_evaluated(seen, launched, tmp_path):
    workdir = f"--workdir={tmp_path / 'run'}"
    code, out, err = launched("train", seen, workdir)
    assert code == 0 and "evaluation at step 30" in out, err
    code, out, err = launched("evaluate", workdir, "--split=test")
    found = json.loads((tmp_path / "run/results-test.json").read_text())
    assert code == 0 and found["accuracy"] == 1.0, err
