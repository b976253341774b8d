"""All heads of a translator knocked out, one at a time: what each is worth, and what it costs to know.

    python -m experiments.bench.knockouts runs/demo --split=validation --rows=8

Prints the rise of the loss a token without each head, [layers heads] of each attention, beside the heads'
importance, the mean gradient of their scale (Michel et al. 2019), and their agreement. Then times one
compiled program for all heads, vectorised or a loop inside the program, against a loop of calls of a compiled
program, and checks that its outputs are those of models whose output kernels of the head are zeroed, in
every bit. The rows are the first ones of the batch in the middle of the split.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import functional
from crossattn.analysis.scores import spearman
from crossattn.interventions import importance, intervene, knockouts
from crossattn.train.storage import folder
from experiments import launch
from experiments.bench import contest
from experiments.options import Options
from experiments.runs import parameters, task_of
from experiments.tasks.translation import TranslationTask

_ROUNDS = 5


def main() -> None:
    """Measures and prints."""
    task, params, batch, split = given(__doc__, rows=8)
    told = float(batch["target_segment_ids"].astype(bool).sum())
    print(f"{contest.machine()}; {rows_of(batch)} rows, {told:.0f} tokens of {split}\n")

    losses = functools.partial(token_losses, task, batch)
    model = task.bind(params)
    every, (whole, found) = knockouts(model), jax.jit(all_losses(losses))(params, knockouts(model))
    rise = (np.asarray(found) - np.asarray(whole)).sum((1, 2)) / told
    graded = jax.jit(lambda p: importance(task.bind(p), lambda e: losses(p, e).sum(1)))(params)
    rows = len(batch["target_segment_ids"])  # padded ones too, over which importance is a mean
    shares = np.concatenate([np.ravel(x) for x in graded.values()]) * rows / told
    for title, values in (("rise of the loss without the head", rise), ("importance", shares)):
        print(f"{title}, a token")
        show_heads(every, values)
    print(f"Spearman's correlation of both {spearman(np.abs(rise), shares):.2f}\n")

    contend(losses, params, every)
    same = [bool(np.all(x == y)) for x, y in zip(found, zeroed(losses, params, every), strict=True)]
    print(f"{sum(same)} of {len(same)} heads have the losses of zeroed kernels in every bit")


def given(text: str | None, rows: int) -> tuple[TranslationTask, Any, dict[str, np.ndarray], str]:
    """Reads the command line: the task and parameters of a run, rows of a split, and its name."""
    parser = Options(text)
    parser.add_argument("run", help="work directory of a run of translation")
    parser.add_argument("--split", default="validation", metavar="NAME", help="test; validation")
    parser.add_argument("--step", default="last", metavar="STEP", help="a step, 'last' or 'best'")
    parser.add_argument("--rows", type=int, default=rows, metavar="N", help=f"sentences; {rows}")
    options = parser.parse_args()
    task, params = translator(parser, options.run, options.step)
    return task, params, first_rows(task, options.split, options.rows), options.split


def translator(parser: Options, run: str, step: str) -> tuple[TranslationTask, Any]:
    """Opens a run of translation; ends with a sentence for another."""
    workdir = folder(run)
    task = task_of(workdir)
    config = task.config
    if not isinstance(task, TranslationTask) or task.model_config is None:
        parser.error(f"the run in {workdir} is a {config.task}; expected a translation.")
    return task, parameters(task, workdir, step)


def first_rows(task: TranslationTask, split: str, rows: int) -> dict[str, np.ndarray]:
    """Returns the first rows of the batch in the middle of a split."""
    batches = list(task.eval_batches(split, None))
    return {name: x[:rows] for name, x in batches[len(batches) // 2].items()}


def rows_of(batch: Mapping[str, np.ndarray]) -> int:
    """Returns the rows of a batch that are examples."""
    return int((batch["target_segment_ids"] > 0).any(axis=1).sum())


def token_losses(task: TranslationTask, batch: Mapping[str, Any], params: Any, edits: Any) -> Any:
    """Computes the negative log-likelihood of each target token [B T], 0 for padding."""
    model = intervene(task.bind(params), edits)
    hidden, _ = task.read_source(model, batch, None)
    found = jax.nn.log_softmax(model.logits(hidden))
    told = jnp.take_along_axis(found, jnp.asarray(batch["target_out"])[..., None], -1)[..., 0]
    return jnp.where(task.told(batch), -told, 0)


def all_losses(losses: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the program of the model's losses and, one after the other, those without each head."""

    def run(params: Any, every: Any) -> Any:
        return losses(params, None), jax.lax.map(lambda one: losses(params, one), every)

    return run


def contend(losses: Callable[..., Any], params: Any, every: Any) -> None:
    """Times all knockouts in one program and in a loop of calls."""
    single = jax.jit(losses)
    vectorised = jax.jit(jax.vmap(losses, (None, 0)))
    looped = jax.jit(all_losses(losses))
    count = len(jax.tree.leaves(every)[0])
    each = [jax.tree.map(lambda x, i=i: x[i], every) for i in range(count)]
    contestants = {
        "a loop of calls": lambda: jax.block_until_ready([single(params, one) for one in each]),
        "one program, vectorised": lambda: jax.block_until_ready(vectorised(params, every)),
        "one program, a loop": lambda: jax.block_until_ready(looped(params, every)),
    }
    contest.show(f"{count} heads", contest.alternate(contestants, _ROUNDS), "heads", count)


def zeroed(losses: Callable[..., Any], params: Any, every: Any) -> Any:
    """Yields the losses of models whose output kernel of a head is 0, in the order of the knockouts."""
    single = jax.jit(functools.partial(losses, edits=None))
    flat = functional.flatten(params)
    for site, edit in every.items():
        _, L, N = edit.scale.shape
        half, name, _ = site.split(".")
        stack = half if half == "encoder" else f"{half}.stack"
        for layer in range(L):
            looped, scanned = (f"{stack}.layers.{at}{name}.out.kernel" for at in (f"{layer}.", ""))
            for head in range(N):
                path, at = (looped, head) if looped in flat else (scanned, (layer, head))
                yield single(functional.nest(flat | {path: flat[path].at[at].set(0)}))


def show_heads(every: Mapping[str, Any], values: np.ndarray) -> None:
    """Prints a number for each head, a line for each layer."""
    rows = iter(values)
    for site, edit in every.items():
        _, L, N = edit.scale.shape
        for layer in range(L):
            numbers = " ".join(f"{next(rows):7.3f}" for _ in range(N))
            print(f"  {site.removesuffix('.heads'):<18} {layer}  {numbers}")


if __name__ == "__main__":
    launch.script(main)
