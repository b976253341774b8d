"""A task small enough to train in a test: predict a token from the one before, with dropout.

Also a program, for tests that need a process of their own: `python toy_task.py WORKDIR OPTIONS`
with options as JSON; it prints "tick STEP" after every step and at the end one line of JSON.
"""

import json
import resource
import signal
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from crossattn.train import processes
from crossattn.train.config import CheckpointConfig, TrainConfig
from crossattn.train.errors import TrainError
from crossattn.train.loop import train
from crossattn.train.losses import cross_entropy
from crossattn.train.optim import OptimConfig
from crossattn.train.sharding import MeshConfig
from crossattn.train.writers import Jsonl, Writer

VOCAB, WIDTH, HIDDEN = 16, 8, 32
AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "hidden": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
    "norm": {"scale": ("norm",)},
    "output": {"kernel": ("mlp", "vocab")},
}


class ToyBatches:
    """Batch n is a function of n and of nothing else; rows go round the shards in turn."""

    rows, length = 16, 6

    def __init__(self, shard=(0, 1), poison_at=None, delay=0.0, broken_in=None):
        self.shard, self.poison_at, self.position = shard, poison_at, 0
        self.delay, self.broken_in = delay, broken_in

    def __next__(self):
        time.sleep(self.delay)
        if self.position == 5 and self.shard[0] == self.broken_in:
            raise ValueError("row 5 cannot be read")
        random = np.random.default_rng([7, self.position])
        source = random.integers(0, VOCAB, (self.rows, self.length))
        lengths = random.integers(1, self.length + 1, (self.rows, 1))
        batch = {
            "target_in": source,
            "target_out": (3 * source + 1) % VOCAB,
            "target_segment_ids": np.arange(self.length) < lengths,
        }
        self.position += 1
        if self.position == self.poison_at:
            batch["target_in"] = np.full_like(source, -1)
        share = self.rows // self.shard[1]
        own = slice(self.shard[0] * share, (self.shard[0] + 1) * share)
        return {name: x[own].astype(np.int32) for name, x in batch.items()}

    def get_state(self):
        return {"position": np.int64(self.position)}

    def set_state(self, state):
        self.position = state["position"]


@dataclass
class ToyTask:
    """poison_at: the batch, from 1, that makes the loss NaN; delay: seconds to make a batch;
    broken_in: the shard whose sixth batch cannot be read."""

    dropout: float = 0.1
    poison_at: int | None = None
    delay: float = 0.0
    broken_in: int | None = None

    def init(self, key):
        keys = iter(jax.random.split(key, 3))
        normal = lambda *shape: jax.random.normal(next(keys), shape) * 0.3  # noqa: E731
        return {
            "embedding": {"table": normal(VOCAB, WIDTH)},
            "hidden": {"kernel": normal(WIDTH, HIDDEN), "bias": jnp.zeros(HIDDEN)},
            "norm": {"scale": jnp.ones(1)},
            "output": {"kernel": normal(HIDDEN, VOCAB)},
        }

    def logical_axes(self):
        return AXES

    def logits(self, params, tokens, key=None):
        x = params["embedding"]["table"].at[tokens].get(mode="fill", wrap_negative_indices=False)
        x = jax.nn.gelu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        if key is not None and self.dropout:
            x = jnp.where(jax.random.bernoulli(key, self.dropout, x.shape), 0.0, x)
        return x * params["norm"]["scale"] @ params["output"]["kernel"]

    def loss(self, params, batch, key):
        logits = self.logits(params, batch["target_in"], key)
        real = batch["target_segment_ids"] > 0
        loss, sums = cross_entropy(logits, batch["target_out"], real, 0.1, 1e-4)
        return loss, sums | {"tokens": sums["weight"]}

    def train_iterator(self, shard_index, shard_count):
        return ToyBatches(
            shard=(shard_index, shard_count),
            poison_at=self.poison_at,
            delay=self.delay,
            broken_in=self.broken_in,
        )

    def evaluate(self, params, step):
        tokens = np.arange(VOCAB)
        best = jax.jit(self.logits)(params, tokens).argmax(-1)
        return {"accuracy": float((best == (3 * tokens + 1) % VOCAB).mean()), "seen": float(step)}

    def save_assets(self, directory):
        (directory / "vocabulary.txt").write_text(str(VOCAB))


def param_shapes():
    return jax.eval_shape(ToyTask().init, jax.random.key(0))


def assert_same(a, b):
    """The same structure and the same bits."""
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def checksum(tree):
    """Checksum of the bits of all arrays, wherever their parts lie."""
    whole = multihost_utils.process_allgather(tree, tiled=True)
    return zlib.crc32(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(whole)))


def main(workdir, options):
    """Joins other processes or limits the size of files when asked, then trains."""
    if "join" in options:
        processes.join(**options["join"])
    if "file_limit" in options:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["file_limit"],) * 2)
    for name, own in options.get("runs", {"": {}}).items():
        run(workdir / name, options | own)


def run(workdir, options):
    """One run; prints what came out, or the error and exit code 2."""
    config = TrainConfig(
        **options.get("config", {}),
        optim=OptimConfig(**options.get("optim", {})),
        mesh=MeshConfig(**options.get("mesh", {})),
        checkpoint=CheckpointConfig(**options.get("checkpoint", {})),
    )
    task = ToyTask(**options.get("task", {}))
    try:
        result = train(task, config, workdir, writers=[Printed(), Jsonl(workdir / "metrics.jsonl")])
    except TrainError as error:
        print(json.dumps({"error": str(error), "type": type(error).__name__}), flush=True)
        sys.exit(2)
    split = [x for x in jax.tree.leaves(result.state) if not x.sharding.is_fully_replicated]
    out = {
        "run": workdir.name,
        "status": result.status,
        "step": result.step,
        "evaluation": result.evaluation,
        "state": checksum(result.state),
        "split_arrays": len(split),
    }
    print(json.dumps(out), flush=True)


class Printed(Writer):
    """Steps and notes on stdout."""

    def tick(self, step, values):
        print(f"tick {step} {values['loss']:.9g}", flush=True)

    def note(self, text):
        print(f"note {text}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
