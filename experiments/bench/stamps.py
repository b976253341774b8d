"""Counts of the stamps: pictures by kind and split, families, captions by language, recordings by voice.

    python -m experiments.bench.stamps
    python -m experiments.bench.stamps --draw=stamps.png --languages=en,fr,hi

The first call fetches the package and prepares it, half a minute for each voice. The figure has stamps of the
training split, at equal distances, with their captions in some languages.
"""

import io
from collections import Counter

from crossattn.data import sources
from crossattn.data.features import Image
from crossattn.data.sources import SPLITS, stamps
from experiments import launch
from experiments.options import Options

_SHOWN = 12  # stamps of the figure


def main() -> None:
    """Counts and prints."""
    parser = Options(__doc__)
    parser.add_argument("--draw", metavar="FILE", help="draw a few stamps into this picture")
    parser.add_argument(
        "--languages", default="en,fr", metavar="A,B", help="of the captions of the picture; en,fr"
    )
    options = parser.parse_args()
    _print_kinds()
    _print_captions()
    for voice in stamps.VOICES:
        print(f"| {voice} | {_recordings(voice)} |", flush=True)
    if options.draw:
        _draw(options.draw, options.languages.split(","))


def _print_kinds() -> None:
    """Prints the pictures of each split by kind, and the families."""
    opened = {split: sources.open_source("stamps/en", split) for split in SPLITS}
    kinds = {split: Counter(each["kind"] for each in opened[split]) for split in SPLITS}
    for kind in stamps.CLASSES["kind"]:
        print(f"| {kind} | {' | '.join(str(kinds[split][kind]) for split in SPLITS)} |")
    print(f"| all | {' | '.join(str(len(opened[split])) for split in SPLITS)} |")
    families = (len({each["family"] for each in opened[split]}) for split in SPLITS)
    print(f"| families | {' | '.join(map(str, families))} |")


def _print_captions() -> None:
    """Prints the numbers of captions, and the languages of each."""
    every = ",".join(stamps.LANGUAGES)
    found = Counter(
        each["language"]
        for split in SPLITS
        for each in sources.open_source(f"stamps/{every}", split)
    )
    for least, most in ((690, 10**9), (660, 690), (0, 660)):
        own = [f"{name} {count}" for name, count in found.items() if least <= count < most]
        print(f"captions: {', '.join(own)}")


def _recordings(voice: str) -> str:
    """Returns the numbers of recordings in each split, and their minutes."""
    import soundfile

    counts, seconds = [], 0.0
    for split in SPLITS:
        opened = sources.open_source("stamps/en", split, voice=voice)
        counts.append(str(len(opened)))
        seconds += sum(soundfile.info(io.BytesIO(each["sound"])).duration for each in opened)
    return f"{' | '.join(counts)} | {seconds / 60:.1f}"


def _draw(path: str, languages: list[str]) -> None:
    """Draws stamps with their captions."""
    from crossattn import viz

    split = [sources.open_source(f"stamps/{language}", "train") for language in languages]
    texts = [{each["id"]: each["caption"] for each in own} for own in split]
    whole = [each for each in split[0] if all(each["id"] in own for own in texts)]
    chosen = [whole[i * len(whole) // _SHOWN] for i in range(_SHOWN)]
    image = Image(160, 160)
    pictures = [image.prepare(each["image"]) / 2 + 0.5 for each in chosen]
    lines = ["\n".join(own[each["id"]] for own in texts) for each in chosen]
    viz.captions(pictures, lines).savefig(path, dpi=72)


if __name__ == "__main__":
    launch.script(main)
