"""Tokenise the training data of a config once, so that every later start takes seconds.

    python -m experiments.prepare --config=configs/wmt14_de_en.py
    python -m experiments.prepare --config=configs/libreoffice.py:fr --workers=8

Training does so itself for a large corpus. Stopped or killed, the same command continues.
"""

from collections.abc import Sequence

from absl import flags

from experiments import launch
from experiments.initial import assets_begun_with
from experiments.settings import check
from experiments.tasks import make_task

_WORKERS = flags.DEFINE_integer(
    "workers", None, "Processes; default: the cores that there are.", lower_bound=1
)
FLAGS = (launch.CONFIG, _WORKERS)


def main(arguments: Sequence[str]) -> int:
    """Prepares the corpus of the command line's config."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    config = launch.required_config()
    check(config)
    task = make_task(config, assets_begun_with(config))
    pairs, folder = task.corpus.prepare(_WORKERS.value)
    print(f"{len(pairs)} of {pairs.total} examples are in {folder}", flush=True)
    return 0


if __name__ == "__main__":
    launch.run(main)
