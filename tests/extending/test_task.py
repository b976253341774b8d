"""A task and a model of one's own, by files alone: named in a config, trained and evaluated."""

import itertools
import json
import textwrap

import pytest

from configs import lm_small
from experiments import keys, tasks
from experiments.errors import SettingsError

TASK = '''
"""Which of two bags of numbers a vector is from: no text, no tokens, an example's own weight."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.keys import Key
from experiments.tasks import base

KEYS = {
    "data.batch_size": Key(int, "Rows of a batch.", "[1, inf)"),
    "data.noise": Key(float, "How far examples lie from their centres.", "[0, inf)"),
}


class Batches:
    def __init__(self, data, seed):
        self.data, self.seed, self.step = data, seed, 0

    def __next__(self):
        rng = np.random.default_rng([self.seed, self.step])
        self.step += 1
        label = rng.integers(0, 2, self.data.batch_size)
        x = (2.0 * label - 1.0)[:, None] + self.data.noise * rng.normal(size=(len(label), 4))
        return {"x": x.astype(np.float32), "label": label.astype(np.int32)}

    def get_state(self):
        return self.step

    def set_state(self, state):
        self.step = state


class ClassificationTask(base.Task):
    metrics = ("loss", "accuracy")
    reads = ("x",)

    def loss(self, params, batch, key):
        logits = self.bind(params).hidden(batch["x"])
        nll = -jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch["label"]]
        right = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
        sums = {"loss": nll.sum(), "accuracy": right.sum(), "weight": jnp.float32(len(logits))}
        return nll.sum(), jax.lax.stop_gradient(sums)

    def train_iterator(self, shard_index, shard_count):
        return Batches(self.config.data, self.config.seed)

    def eval_batches(self, split, mesh):
        batches = Batches(self.config.data, len(split))
        return [next(batches) for _ in range(2)]
'''
MODEL = '''
"""One hidden layer."""

from dataclasses import dataclass, replace

import jax
from flax import nnx

from crossattn.keys import ConfigKey
from crossattn.nn import linear

KEYS = {"wide": ConfigKey(int, "Hidden features.", "[1, inf)")}


@dataclass(frozen=True)
class TwoLayerNetConfig:
    wide: int
    inputs: int = 4


def tiny(**changes):
    return replace(TwoLayerNetConfig(wide=8), **changes)


class TwoLayerNet(nnx.Module):
    def __init__(self, config, *, rngs):
        sizes = dict(in_axes=("embed",), out_axes=("mlp",), rngs=rngs)
        self.first = linear(config.inputs, config.wide, **sizes)
        self.last = linear(config.wide, 2, **sizes)

    def hidden(self, x):
        return self.last(jax.nn.relu(self.first(x)))
'''
CONFIG = """
from ml_collections import ConfigDict

from configs import parts


def get_config(arg=""):
    return ConfigDict(
        dict(
            task="mine{n}.classification",
            seed=0,
            data=dict(batch_size=8, noise=0.5),
            model=dict(name="mine{n}.two_layer_net", wide=16),
            optim=parts.adamw(learning_rate=1e-2, warmup_steps=1),
            mesh=parts.mesh(),
            train=parts.train(steps=12, log_every=4),
            checkpoint=parts.checkpoint(every=6, best_metric="accuracy"),
        )
    )
"""
_NUMBERS = itertools.count()  # or the next test would find the modules of the one before


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The flag of a config whose task and model are files in a folder on the import path."""
    number = next(_NUMBERS)
    folder = tmp_path / f"mine{number}"
    folder.mkdir()
    (folder / "classification.py").write_text(TASK)
    (folder / "two_layer_net.py").write_text(MODEL)
    (tmp_path / "config.py").write_text(CONFIG.replace("{n}", str(number)))
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"--config={tmp_path / 'config.py'}"


def test_it_is_trained_and_evaluated_by_the_launchers(mine, launched, tmp_path):
    workdir = f"--workdir={tmp_path / 'run'}"
    code, out, err = launched("train", mine, workdir, "--config.data.noise=0.25")
    assert code == 0 and "evaluation at step 12" in out, err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0]
    assert not any("tokens_per_second" in line for line in lines)
    code, out, err = launched("evaluate", workdir, "--split=test")
    found = json.loads((tmp_path / "run/results-test.json").read_text())
    assert code == 0 and found["accuracy"] > 0.9 and found.keys() == {"loss", "accuracy"}, err


def test_its_keys_are_shown_and_held_to(mine, launched, refused, tmp_path):
    code, out, _ = launched("train", "--help=config", mine)
    assert code == 0 and "How far examples lie from their centres." in out
    assert "Hidden features." in out and "tokenizer" not in out and "label_smoothing" not in out
    workdir = f"--workdir={tmp_path / 'run'}"
    for override, said in (
        ("--config.data.noise=-1", "data.noise is -1.0; expected a number, 0 or more"),
        ("--config.model.wide=0", "model.wide is 0; expected a whole number, 1 or more"),
        ("--config.checkpoint.best_metric=bleu", "'bleu'; expected one of loss, accuracy, or none"),
        ("--config.model.name=decoder", "model.wide, which is no key of a"),
        ("--config.train.accumulate=3", "batches of 8 rows"),
    ):
        assert said in refused("train", mine, override, workdir), override
    assert not (tmp_path / "run").exists()


def test_flags_of_other_tasks_are_refused(mine, launched, refused, tmp_path):
    workdir = f"--workdir={tmp_path / 'run'}"
    assert launched("train", mine, workdir, "--config.train.steps=1")[0] == 0
    assert "--num_beams says nothing to a mine" in refused("evaluate", workdir, "--num_beams=2")
    assert "classification, not a translation." in refused("translate", workdir, "a cat")


def test_a_file_dropped_into_the_folder_of_tasks_is_one(tmp_path, monkeypatch):
    (tmp_path / "sorting.py").write_text(
        textwrap.dedent('''
        """Sorting."""

        from experiments.tasks.base import Task

        KEYS = {}


        class SortingTask(Task):
            pass
        ''')
    )
    (tmp_path / "parts_of_it.py").write_text('"""No task."""\n')
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    assert tasks.find("sorting").__name__ == "SortingTask"
    assert "sorting" in tasks.known() and "parts_of_it" not in tasks.known()
    assert "optim.learning_rate" in keys.of("sorting", "decoder")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "--config.task=sort",
            "'sort'; expected one of captioning, classification,",
        ),
        ("--config.task=mine.nowhere", "which cannot be imported (No module named 'mine"),
        ("--config.task=json.decoder", "but json.decoder has no class DecoderTask."),
        ("--config.task=corpus", "'corpus'; expected one of captioning"),
        (
            "--config.model.name=gpt",
            "there is no model 'gpt'; expected one of bert, clip, crossvit,",
        ),
        ("--config.model.name=mine.gpt", "the model 'mine.gpt' cannot be imported"),
        ("--config.model.name=json.decoder", "json.decoder has no Decoder"),
    ],
)
def test_an_unknown_name_is_one_line_that_lists_the_known(refused, tmp_path, override, said):
    given = ("--config=configs/copy_task.py:tiny", override, f"--workdir={tmp_path / 'run'}")
    assert said in refused("train", *given)


def test_a_model_that_the_task_cannot_train_is_refused():
    config = lm_small.get_config("tiny")
    config.model.name = "transformer"
    with pytest.raises(
        SettingsError, match=r"Transformer has no hidden\(tokens, segment_ids, positions"
    ):
        tasks.find("language_model").check(config)
