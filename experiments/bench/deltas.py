"""Times rows of a batch that each have a delta of their own, beside the base.

    python -m experiments.bench.deltas

Four deltas of a translator, which change its cross-attention alone or every parameter: a call on 32 rows of
32 tokens, eight of each delta, medians of alternating calls, and the temporaries of the compiled program.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp

import crossattn as xa
from crossattn import functional
from crossattn.weights import deltas
from experiments import launch
from experiments.bench import contest, models
from experiments.options import Options

ROWS, LENGTH, DELTAS, ROUNDS = 32, 32, 4, 9
CHANGES = {"cross-attention": r"\.cross\.", "all": "."}


def main() -> None:
    """Measures and prints."""
    Options(__doc__).parse_args()
    print(f"{contest.machine()}; jax {jax.__version__} on {jax.default_backend()}\n", flush=True)
    build, base = models.ours()
    which = jnp.arange(ROWS) % DELTAS
    tokens = jax.random.randint(jax.random.key(1), (2, ROWS, LENGTH), 3, models.VOCABULARY)
    source, target_in = tokens

    def logits(params: Any, source: jax.Array, target_in: jax.Array) -> jax.Array:
        return xa.apply(build, params, source, target_in)

    compiled: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "base": (jax.jit(logits).lower(base, *tokens).compile(), (base, source, target_in))
    }
    for name, pattern in CHANGES.items():
        several = deltas.stack(base, [_changed(base, pattern, seed) for seed in range(DELTAS)])
        call = jax.jit(lambda several, which, *batch: several.rows(logits, which, *batch))
        given = (several, which, source, target_in)
        compiled[f"deltas of {name}"] = call.lower(*given).compile(), given
        share = deltas.share(_changed(base, pattern, 0), base)
        print(f"{name}: {share:.1%} of {functional.count(base):,} parameters differ from the base")
    for name, (program, _) in compiled.items():
        print(f"{name}: {program.memory_analysis().temp_size_in_bytes / 1e6:.0f} MB of temporaries")
    calls = {
        name: lambda program=program, given=given: jax.block_until_ready(program(*given))
        for name, (program, given) in compiled.items()
    }
    seconds = contest.alternate(calls, ROUNDS)
    for name in CHANGES:
        pair = f"deltas of {name}", "base"
        title = f"\n{ROWS} rows of {LENGTH} tokens, {DELTAS} deltas"
        contest.show(title, {each: seconds[each] for each in pair}, "tokens", ROWS * LENGTH)


def _changed(base: Any, pattern: str, seed: int) -> deltas.Delta:
    """Returns a delta that changes the parameters whose path has the pattern."""
    flat = functional.flatten(base)
    keys = jax.random.split(jax.random.key(seed), len(flat))
    new = {
        name: x + 0.01 * jax.random.normal(key, x.shape) if re.search(pattern, name) else x
        for key, (name, x) in zip(keys, flat.items(), strict=True)
    }
    return deltas.difference(functional.nest(new), base)


if __name__ == "__main__":
    launch.script(main)
