"""Decoding with a translator of 7.6 M parameters against ``generate`` of ``transformers``.

    python -m experiments.bench.decode

Equal sizes, sources and cores, float32, 60 new tokens a sentence, greedy and with four beams. Prints medians,
ratios, and the time of the first call: without compiled programs, and in a new process that finds them on
disk.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from crossattn import decode, functional
from experiments import launch
from experiments.bench import contest, models
from experiments.options import Options

NEW_TOKENS, SOURCE_LENGTH, ROUNDS = 60, 32, 9
WORK = ((32, 1, 4.0), (1, 1, 4.0), (8, 4, 6.0))  # rows, beams, and the wanted ratio of times


def main() -> None:
    """Measures and prints."""
    parser = Options(__doc__)
    parser.parse_args()
    parser.needs("torch", "transformers", install="crossattn[bench]")
    print(f"{contest.machine()}; jax {jax.__version__}\n")
    with tempfile.TemporaryDirectory() as folder:
        for batch, beams, bar in WORK:
            source = np.random.default_rng(0).integers(4, models.VOCABULARY, (batch, SOURCE_LENGTH))
            both = {"transformers generate": theirs, "crossattn": ours}
            first, seconds = contend(both, source, beams, folder)
            again, _ = contend({"crossattn": ours}, source, beams, folder, rounds=0)
            how = "greedy" if beams == 1 else f"{beams} beams"
            title = f"batch {batch}, {how}, {SOURCE_LENGTH} source and {NEW_TOKENS} new tokens"
            contest.show(f"{title} (bar {bar:g}x)", seconds, "tokens", batch * NEW_TOKENS)
            print(
                f"  first call {first['crossattn']:.1f} s; {again['crossattn']:.1f} s in the next process; "
                f"transformers {first['transformers generate']:.1f} s\n",
                flush=True,
            )


def contend(
    makers: dict[str, Callable], source: Any, beams: int, folder: str, rounds: int = ROUNDS
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Times the first call and later calls of contestants, each in its own process."""
    first = {}
    with contextlib.ExitStack() as processes:
        calls = {
            name: processes.enter_context(contest.elsewhere(make, source, beams, folder))
            for name, make in makers.items()
        }
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            first[name] = time.perf_counter() - start
        return first, contest.alternate(calls, rounds)


def ours(source: Any, beams: int, folder: str) -> Callable[[], Any]:
    """Returns a call that decodes all tokens, since no token is the end."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    build, params = models.ours()

    @jax.jit
    def search(params, source):
        model = functional.bind(build, params)
        return decode.generate(model, source, max_new_tokens=NEW_TOKENS, num_beams=beams, eos_id=-1)

    source = source.astype(np.int32)
    return lambda: jax.block_until_ready(search(params, source))


def theirs(source: Any, beams: int, folder: str) -> Callable[[], Any]:
    """Returns a call of ``generate`` of ``transformers`` for the same number of tokens."""
    import torch

    marian = models.marian().eval()
    ids = torch.tensor(source)
    mask = torch.ones_like(ids)
    lengths = dict(min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)

    def call() -> None:
        with torch.inference_mode():
            marian.generate(
                input_ids=ids, attention_mask=mask, num_beams=beams, do_sample=False, **lengths
            )

    return call


if __name__ == "__main__":
    launch.script(main)
