"""Score a checkpoint on a split: translation, loss, word alignment.

python -m experiments.evaluate --workdir=runs/fr --split=test --beams=5
"""

from collections.abc import Sequence

from absl import flags

from experiments import launch, report
from experiments.runs import BEAMS, open_run

_SPLIT = flags.DEFINE_string("split", "test", "train, validation or test.")
_LIMIT = flags.DEFINE_integer(
    "limit", None, "Score only the first so many examples.", lower_bound=1
)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    workdir, task, params = open_run()
    if task.config.task == "translation":
        results = report.translation_results(
            task, params, _SPLIT.value, beams=BEAMS.value, limit=_LIMIT.value
        )
    else:
        results = task.split_loss(params, _SPLIT.value)
        print(task.sample(params, task.config.data.target_len)[0])
    report.save(results, workdir / f"results-{_SPLIT.value}.json")
    report.show(results)
    return 0


if __name__ == "__main__":
    launch.run(main)
