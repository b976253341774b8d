"""Translate sentences from the command line or standard input, and draw what was attended to.

python -m experiments.translate --workdir=runs/fr "The black cat sleeps." --plot=cat.png
cat text.en | python -m experiments.translate --workdir=runs/fr > text.fr
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from crossattn import viz
from crossattn.train.alignment import Recipe
from experiments import launch, report
from experiments.runs import BEAMS, open_run


def main(arguments: Sequence[str]) -> int:
    """The command."""
    picture = launch.picture()
    sentences = list(arguments) or _standard_input()
    _, task, params = open_run("translation")
    config = task.config
    options = {} if BEAMS.value is None else {"beams": BEAMS.value}
    translator = task.translator(params, **options)
    translations = translator.texts(sentences)
    print("\n".join(translations), flush=True)
    if translator.cut_sources:
        print(
            f"note: {translator.cut_sources} of {len(sentences)} sentences were longer than "
            f"{config.data.source_len} tokens and were cut.",
            file=sys.stderr,
        )
    if picture:
        recipe = report.stated_recipe(config)
        draw(translator, list(zip(sentences, translations, strict=True)), recipe, picture)
    return 0


def draw(translator, pairs: Sequence[tuple[str, str]], recipe: Recipe, path: Path) -> Path:
    """One alignment heatmap for each sentence pair, at most six; empty translations have none."""
    drawn = [(source, target) for source, target in pairs if target][:6]
    if not drawn:
        raise launch.Refused("every translation is empty, so there is no attention to draw.")
    found = translator.attention(drawn)
    matrices = [recipe.token_weights(a.weights, len(a.target_tokens) - 1) for a in found]
    figure = viz.gallery(
        matrices,
        [a.source_tokens for a in found],
        [a.target_tokens[:-1] for a in found],
        title=f"cross-attention: {recipe}",
    )
    return viz.save(figure, path)


def _standard_input() -> list[str]:
    """Lines of standard input, which must be UTF-8."""
    lines = []
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            lines.append(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise launch.Refused(
                f"line {number} of standard input is not UTF-8 (byte {error.start + 1}); convert it "
                "first, for example with iconv."
            ) from None
    if not lines:
        raise launch.Refused("got no sentence; give some as arguments or on standard input.")
    return lines


if __name__ == "__main__":
    launch.run(main)
