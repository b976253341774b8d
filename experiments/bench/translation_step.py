"""A training step of a 7.6 M-parameter translator: ours against Marian of PyTorch ``transformers``.

    python -m experiments.bench.translation_step

Same sizes, sentences, padding, dropout, label smoothing, clipping, AdamW, float32, cores. Also
prints what the input pipeline costs beside a step.
"""

import time

import jax
import numpy as np
import optax
import torch

from crossattn import functional
from crossattn.data.errors import DataUnavailable
from crossattn.data.pipeline import make_train_iterator
from crossattn.data.sources import open_source
from crossattn.data.tokenizers import train_tokenizer
from crossattn.train.linear_loss import linear_cross_entropy
from crossattn.train.state import init_state
from crossattn.train.step import make_train_step
from experiments.bench import contest, models
from experiments.launch import keep_heap

SMOOTHING, LEARNING_RATE, CLIP, ROUNDS = 0.1, 1e-3, 1.0, 15


def main() -> None:
    """Measure and print."""
    keep_heap()
    print(f"{contest.machine()}; jax {jax.__version__}, torch {torch.__version__}\n")
    iterator = sentences()
    batch = padded(iterator)
    rows, length = batch["target_in"].shape
    tokens = int((batch["target_segments"] > 0).sum())
    contestants = {"PyTorch Marian": torch_step(batch), "crossattn": our_step(batch)}
    seconds = contest.alternate(contestants, ROUNDS)
    title = f"training step, {rows} pairs of {batch['source'].shape[1]} + {length} tokens, float32"
    contest.show(title, seconds, "target tokens", tokens)

    start = time.perf_counter()
    for _ in range(100):
        next(iterator)
    each = (time.perf_counter() - start) / 100
    step = float(np.median(seconds["crossattn"]))
    print(f"input pipeline {each * 1e3:.2f} ms a batch, {100 * each / step:.2f} % of a step")


def sentences():
    """Batches of sentences of like length; LibreOffice help, or phrases where it cannot be had."""
    try:
        source = open_source("libreoffice_help/en-fr")
    except DataUnavailable as reason:
        print(reason)
        source = open_source("phrases")
    pairs = [source[i] for i in range(len(source))]
    texts = [pair[side] for pair in pairs for side in ("source", "target")]
    tokenizer = train_tokenizer(texts, models.VOCABULARY)
    return make_train_iterator(
        pairs, tokenizer, mode="bucket", rows=16, source_len=128, target_len=128, prefetch=0
    )


def padded(iterator) -> dict[str, np.ndarray]:
    """The first batch with about 2,048 + 2,048 positions of sentences of middling length."""
    for batch in iterator:
        if 48 <= batch["target_in"].shape[1] <= 64:
            return batch
    raise RuntimeError("the iterator ended")


def our_step(batch):
    """One jitted step with donated state."""
    build, params = models.ours()

    def loss(params, batch, key):
        model = functional.bind(build, params)
        hidden, _ = model.hidden(
            batch["source"],
            batch["target_in"],
            source_segments=batch["source_segments"],
            target_segments=batch["target_segments"],
            key=key,
        )
        weights = batch["target_segments"] > 0
        return linear_cross_entropy(
            hidden,
            model.output_table(),
            batch["target_out"],
            weights,
            label_smoothing=SMOOTHING,
        )

    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE))
    step = make_train_step(loss, optimizer)
    state = init_state(params, optimizer)

    def call():
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    return call


def torch_step(batch):
    """The usual PyTorch loop body."""
    model = models.marian().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    tensors = {name: torch.tensor(value, dtype=torch.long) for name, value in batch.items()}
    labels = tensors["target_out"].masked_fill(tensors["target_segments"] == 0, -100)

    def call():
        optimizer.zero_grad()
        out = model(
            input_ids=tensors["source"],
            attention_mask=tensors["source_segments"],
            decoder_input_ids=tensors["target_in"],
        )
        loss = torch.nn.functional.cross_entropy(
            out.logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTHING
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return call


if __name__ == "__main__":
    main()
