"""A training step of a translator of 7.6 M parameters against Marian of PyTorch ``transformers``.

    python -m experiments.bench.translation_step

Equal sizes, sentences, dropout, label smoothing, clipping, AdamW, float32 and cores; on the same padded
arrays, and with sentences packed on our side, of like length and in random order. Also prints the time of
the input pipeline as a share of a step.
"""

import importlib.metadata
import time
from dataclasses import replace

import jax
import numpy as np
import optax

from crossattn import functional
from crossattn.data.errors import DataUnavailable
from crossattn.data.features.text import lay_text
from crossattn.data.packing import Bucket, plan_buckets, plan_packed
from crossattn.data.pipeline import make_train_iterator
from crossattn.data.sources import open_source
from crossattn.data.tokenizers import train_tokenizer
from crossattn.train.linear_loss import linear_cross_entropy
from crossattn.train.state import init_state
from crossattn.train.step import make_train_step
from experiments import launch
from experiments.bench import contest, models
from experiments.options import Options

SIDES = ("source", "target")
SMOOTHING, LEARNING_RATE, CLIP, ROUNDS = 0.1, 1e-3, 1.0, 15


def main() -> None:
    """Measures and prints."""
    parser = Options(__doc__)
    parser.parse_args()
    parser.needs("torch", "transformers", install="crossattn[bench]")
    launch.keep_heap()
    versions = f"jax {jax.__version__}, torch {importlib.metadata.version('torch')}"
    print(f"{contest.machine()}; {versions}\n")
    corpus = open_pairs()
    like, mixed = iterator(corpus, "bucket"), iterator(corpus, "pack")
    alike = sentences(next(b for b in like if 48 <= b["target_in"].shape[1] <= 64))
    contend("the same padded arrays, sentences of like length", alike, padded)
    contend("the same sentences of like length, ours packed", alike, packed)
    step = contend("sentences in random order, ours packed", sentences(next(mixed)), packed)

    start = time.perf_counter()
    for _ in range(100):
        next(mixed)
    each = (time.perf_counter() - start) / 100
    print(f"input pipeline {each * 1e3:.2f} ms a batch, {100 * each / step:.2f} % of a step")


def contend(title: str, pairs, arranged) -> float:
    """Prints a table; returns the seconds of our step."""
    theirs, ours = padded(pairs), arranged(pairs)
    with contest.elsewhere(torch_step, theirs) as marian:
        contestants = {"PyTorch Marian": marian, "crossattn": our_step(ours)}
        seconds = contest.alternate(contestants, ROUNDS)
    tokens = sum(len(target) - 1 for _, target in pairs)
    shapes = [f"{b['source'].shape} + {b['target_in'].shape}" for b in (theirs, ours)]
    contest.show(
        f"training step, float32, {title}\n  {len(pairs)} pairs; arrays {shapes[0]} against {shapes[1]}",
        seconds,
        "target tokens",
        tokens,
    )
    return float(np.median(seconds["crossattn"]))


def open_pairs():
    """Returns pairs and their tokenizer: LibreOffice help, or phrases if its package is unavailable."""
    try:
        source = open_source("libreoffice_help/en-fr")
    except DataUnavailable as reason:
        print(reason)
        source = open_source("phrases")
    pairs = [source[i] for i in range(len(source))]
    texts = [pair[side] for pair in pairs for side in SIDES]
    return pairs, train_tokenizer(texts, models.VOCABULARY)


def iterator(corpus, mode: str):
    """Returns batches of about 2,048 + 2,048 positions."""
    return make_train_iterator(
        *corpus, mode=mode, batch_size=16, source_len=128, target_len=128, prefetch=0
    )


def sentences(batch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Lists (source, target) ids of all pairs of a batch, the target with begin and end tokens."""
    pairs = []
    for row in range(len(batch["source"])):
        for segment in range(1, batch["target_segment_ids"][row].max() + 1):
            mine = batch["target_segment_ids"][row] == segment
            target = np.append(batch["target_in"][row][mine], batch["target_out"][row][mine][-1])
            pairs.append(
                (batch["source"][row][batch["source_segment_ids"][row] == segment], target)
            )
    return pairs


def padded(pairs) -> dict[str, np.ndarray]:
    """Lays out one pair a row, padded to the longest."""
    lengths = [max(len(pair[side]) for pair in pairs) for side in (0, 1)]
    bucket = Bucket(len(pairs), {"source": lengths[0], "target": lengths[1] - 1})
    return arrange(pairs, lambda *sizes: plan_buckets(*sizes, buckets=[bucket], rng=None))


def packed(pairs) -> dict[str, np.ndarray]:
    """Lays out several pairs a row of 128 tokens, in few rows."""
    rng = np.random.default_rng(0)

    def plan(*sizes):
        widths = {"source": 128, "target": 128}
        (layout,) = plan_packed(*sizes, rows=len(pairs), widths=widths, rng=rng)
        return [replace(layout, rows=int(layout.row.max()) + 1)]

    return arrange(pairs, plan)


def arrange(pairs, plan) -> dict[str, np.ndarray]:
    """Lays out pairs by a plan of one batch."""
    lengths = np.array([(len(source), len(target) - 1) for source, target in pairs])
    named = dict(zip(SIDES, lengths.T, strict=True))
    (layout,) = plan(np.arange(len(pairs)), named)
    sources, targets = ([pairs[i][side] for i in layout.examples.tolist()] for side in (0, 1))
    return lay_text(layout, "source", sources) | lay_text(layout, "target", targets, predicted=True)


def our_step(batch):
    """Returns a call of our jitted step with donated state."""
    build, params = models.ours()

    def loss(params, batch, key):
        model = functional.bind(build, params)
        named = [f"{side}_{what}" for side in SIDES for what in ("segment_ids", "positions")]
        given = {name: batch[name] for name in named}
        hidden, _ = model.hidden(batch["source"], batch["target_in"], **given, key=key)
        told = batch["target_out"], batch["target_segment_ids"] > 0
        return linear_cross_entropy(hidden, model.output_table(), *told, label_smoothing=SMOOTHING)

    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE))
    step = make_train_step(loss, optimizer)
    state = init_state(params, optimizer)

    def call():
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    return call


def torch_step(batch, narrow=False, **sizes):
    """Returns a call of so many steps in PyTorch, of a Marian of these sizes; one by default.

    ``narrow`` computes in bfloat16 by autocast. On a GPU the loss is compiled and AdamW is fused.
    """
    import torch

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    model = models.marian(**sizes).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=gpu)
    tensors = {
        name: torch.tensor(value, dtype=torch.long, device=device) for name, value in batch.items()
    }
    labels = tensors["target_out"].masked_fill(tensors["target_segment_ids"] == 0, -100)
    read = tensors["source_segment_ids"]
    given = {} if read.all() else {"attention_mask": read}  # without it no mask is made

    def loss():
        with torch.autocast(device, torch.bfloat16, enabled=narrow):
            out = model(
                input_ids=tensors["source"], decoder_input_ids=tensors["target_in"], **given
            )
            return torch.nn.functional.cross_entropy(
                out.logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTHING
            )

    compiled = torch.compile(loss) if gpu else loss

    def call(count=1):
        for _ in range(count):
            optimizer.zero_grad()
            compiled().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        if gpu:
            torch.cuda.synchronize()

    return call


if __name__ == "__main__":
    launch.script(main)
