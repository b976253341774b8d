"""Tell the regions of a page apart, and draw them by class and by what they read of each other.

python -m experiments.read_page --workdir=runs/pages --page=12 --region=3 --plot=page.png
"""

from collections.abc import Sequence

from absl import flags

from crossattn import viz
from crossattn.train import processes
from experiments import inputs, launch
from experiments.runs import MEMBER, SPLIT, STEP, open_run
from experiments.tasks.regions import RegionsTask

_PAGE = flags.DEFINE_integer("page", 0, "Which page of the split, from 0.", lower_bound=0)
_REGION = flags.DEFINE_integer(
    "region", 0, "The region, from 0, whose attention is drawn.", lower_bound=0
)
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, MEMBER, SPLIT, _PAGE, _REGION, launch.PLOT, *launch.PROCESSES,
)  # fmt: skip
_SHOWN = 60  # characters of a text


def main(arguments: Sequence[str]) -> int:
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    picture = launch.picture()
    _, task, params = open_run(RegionsTask)
    pages = task.corpus.split(SPLIT.value)
    if _PAGE.value >= len(pages):
        raise launch.Refused(
            f"--page is {_PAGE.value}; the {SPLIT.value} split has pages 0 to {len(pages) - 1}."
        )
    page = pages[_PAGE.value]
    read = task.read_page(params, page)
    if _REGION.value >= len(read.classes):
        raise launch.Refused(
            f"--region is {_REGION.value}; the page has regions 0 to {len(read.classes) - 1}."
        )
    if not processes.is_main():
        return 0
    print(f"{page['id']}: region, class said, class meant, share of the text, text")
    rows = zip(read.classes, page["label"], read.gates, page["text"], strict=False)
    for number, (said, meant, gate, text) in enumerate(rows):
        print(f"{number:3}  {said:<9}  {meant:<9}  {gate:.2f}  {text[:_SHOWN]}")
    if picture:
        pixels = inputs.pixels(page["pictures"]["page"])
        expected = page["label"][: len(read.classes)]
        options = dict(weights=read.weights, region=_REGION.value, title=page["id"])
        viz.save(viz.page(pixels, read.boxes, read.classes, expected=expected, **options), picture)
    return 0


if __name__ == "__main__":
    launch.run(main)
