"""Answers of a trained run to cloze questions, and what it reads for them.

    python -m experiments.answer 7 19 --workdir=runs/point --split=validation
    python -m experiments.answer 7 19 --workdir=runs/point --plot=answers.png

The arguments are numbers of questions of the split, from 0. ``--plot`` draws the passages, each word as dark
as the attention to it from the place of the answer; the right answer has a line around it.
"""

from collections.abc import Sequence

from absl import flags

from crossattn import viz
from crossattn.train import processes
from experiments import launch
from experiments.runs import MEMBER, SPLIT, STEP, open_run
from experiments.tasks.cloze import ClozeTask

_NAMED = flags.DEFINE_integer("answers", 3, "How many answers are printed.", lower_bound=1)
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, MEMBER, SPLIT, _NAMED, launch.PLOT, *launch.PROCESSES,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        raise launch.Refused(
            "got no question; name some: python -m experiments.answer 0 1 --workdir=RUN"
        )
    picture = launch.picture()
    _, task, params = open_run(ClozeTask)
    examples = task.examples(SPLIT.value)
    for number in arguments:
        if not number.isdecimal() or int(number) >= len(examples):
            raise launch.Refused(
                f"got question {number}; the {SPLIT.value} split has 0 to {len(examples) - 1}."
            )
    found = [task.answered(params, examples[int(number)]) for number in arguments]
    if not processes.is_main():
        return 0
    for number, own in zip(arguments, found, strict=True):
        chances = [f"{name} {chance:.2f}" for name, chance in own.chances.items()]
        print(f"{number}: {' '.join(own.question.question)}")
        print(f"    {', '.join(chances[: _NAMED.value])}; right is {own.question.answer}")
    if picture:
        right = [
            [
                place
                for place, word in enumerate(own.question.passage)
                if word == own.question.answer
            ]
            for own in found
        ]
        drawn = viz.texts(
            [own.question.passage for own in found],
            [own.read for own in found],
            titles=[" ".join(own.question.question) for own in found],
            outlined=right,
        )
        viz.save(drawn, picture)
    return 0


if __name__ == "__main__":
    launch.run(main)
