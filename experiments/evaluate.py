"""Score a checkpoint on a split, and print a few samples.

python -m experiments.evaluate --workdir=runs/fr --split=test --num_beams=5
"""

from collections.abc import Sequence

from absl import flags

from crossattn.train import processes
from experiments import launch, report
from experiments.runs import NUM_BEAMS, SPLIT, STEP, open_run

_LIMIT = flags.DEFINE_integer(
    "limit", None, "Score only the first so many examples.", lower_bound=1
)
_SAMPLES = 3
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, SPLIT, NUM_BEAMS, _LIMIT, *launch.PROCESSES,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Scores a run, and writes results-SPLIT.json into its folder."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    path = launch.required_workdir() / f"results-{SPLIT.value}.json"
    _, task, params = open_run()
    launch.writable(path)
    given = {flag.name: flag.value for flag in (NUM_BEAMS, _LIMIT) if flag.value is not None}
    results = task.report(params, SPLIT.value, **given)
    samples = task.samples(params, SPLIT.value)[:_SAMPLES]
    if samples and processes.is_main():
        print("\n\n".join(samples))
    report.save(results, path)
    report.show(results)
    return 0


if __name__ == "__main__":
    launch.run(main)
