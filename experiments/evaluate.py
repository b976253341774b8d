"""Score a checkpoint on a split: translation, loss, word alignment; of text alone, loss and a few samples.

python -m experiments.evaluate --workdir=runs/fr --split=test --num_beams=5
"""

from collections.abc import Sequence

from absl import flags

from crossattn.train import processes
from experiments import launch, report
from experiments.runs import NUM_BEAMS, STEP, open_run
from experiments.settings import check_scores

_SPLIT = flags.DEFINE_string("split", "test", "train, validation or test.")
_LIMIT = flags.DEFINE_integer(
    "limit", None, "Score only the first so many examples.", lower_bound=1
)
_SAMPLES = 3
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, _SPLIT, NUM_BEAMS, _LIMIT, launch.DISTRIBUTED, launch.JOIN_SECONDS,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    path = launch.required_workdir() / f"results-{_SPLIT.value}.json"
    _, task, params = open_run()
    launch.writable(path)
    if task.config.task == "translation":
        check_scores(task.config)
        results = report.translation_results(
            task, params, _SPLIT.value, num_beams=NUM_BEAMS.value, limit=_LIMIT.value
        )
    else:
        results = task.split_loss(params, _SPLIT.value)
        samples = task.sample(params, task.config.data.target_len)
        if processes.is_main():
            print("\n\n".join(samples[:_SAMPLES]))
    report.save(results, path)
    report.show(results)
    return 0


if __name__ == "__main__":
    launch.run(main)
