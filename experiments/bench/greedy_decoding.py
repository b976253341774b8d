"""Greedy decoding of a 7.6 M-parameter translator: ours against ``generate`` of ``transformers``.

    python -m experiments.bench.greedy_decoding

Same sizes, sources and cores, float32, 60 new tokens for every sentence.
"""

import jax
import numpy as np
import torch

from crossattn import decode, functional
from experiments.bench import contest, models
from experiments.launch import keep_heap

NEW_TOKENS, SOURCE_LENGTH, ROUNDS = 60, 32, 11


def main() -> None:
    """Measure and print."""
    keep_heap()
    print(f"{contest.machine()}; jax {jax.__version__}, torch {torch.__version__}\n")
    build, params = models.ours()
    for batch in (1, 32):
        source = np.random.default_rng(0).integers(4, models.VOCABULARY, (batch, SOURCE_LENGTH))
        with contest.elsewhere(torch_greedy, source) as generate:
            contestants = {
                "transformers generate": generate,
                "crossattn": our_greedy(build, params, source),
            }
            seconds = contest.alternate(contestants, ROUNDS)
        title = (
            f"greedy decoding, batch {batch}, {SOURCE_LENGTH} source and {NEW_TOKENS} new tokens"
        )
        contest.show(title, seconds, "tokens", batch * NEW_TOKENS)


def our_greedy(build, params, source):
    """An end-of-sentence id outside the vocabulary never comes up, so nothing stops early."""

    @jax.jit
    def search(params, source):
        model = functional.bind(build, params)
        return decode.translate(model, source, max_length=NEW_TOKENS, eos_id=-1)

    source = source.astype(np.int32)
    return lambda: jax.block_until_ready(search(params, source))


def torch_greedy(source):
    """``generate`` with its cache, kept from stopping."""
    marian = models.marian().eval()
    ids = torch.tensor(source)
    mask = torch.ones_like(ids)

    def call():
        with torch.inference_mode():
            marian.generate(
                input_ids=ids,
                attention_mask=mask,
                num_beams=1,
                do_sample=False,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
            )

    return call


if __name__ == "__main__":
    main()
