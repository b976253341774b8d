"""Translate sentences from the command line or standard input, and draw what was attended to.

python -m experiments.translate --workdir=runs/fr "The black cat sleeps." --plot=cat.png
python -m experiments.translate --workdir=runs/fr "The black cat sleeps." --num_beams=5 --nbest=3
python -m experiments.translate --workdir=runs/fr "The black cat sleeps." --temperature=0.8 --top_p=0.9
cat text.en | python -m experiments.translate --workdir=runs/fr > text.fr
python -m experiments.translate --workdir=runs/fr --markup "Press <b>Enter</b> to <i>open</i> the file."

--temperature, --top_k and --top_p draw tokens; without them the likeliest are searched for. --markup takes
the tags off each text and puts them where attention says that their words went.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from crossattn import viz
from crossattn.decode import Capture, constraints, markup, sampling
from crossattn.train import processes
from crossattn.train.alignment import Recipe
from experiments import inputs, launch
from experiments.runs import BASE, MEMBER, NUM_BEAMS, SEED, STEP, open_run
from experiments.tasks.alignment import markup_recipe, stated_recipe
from experiments.tasks.generation import Attention
from experiments.tasks.tags import placed
from experiments.tasks.translation import TranslationTask

_LENGTH_PENALTY = flags.DEFINE_float(
    "length_penalty", None, "Larger favours longer texts; default: the config's.", lower_bound=0.0
)
_NBEST = flags.DEFINE_integer(
    "nbest", None, "So many texts a sentence, best first, as lines SCORE TAB TEXT.", lower_bound=1
)
_MARKUP = flags.DEFINE_bool("markup", False, "Each text is HTML, whose tags follow their words.")
_NO_REPEAT_NGRAM = flags.DEFINE_integer(
    "no_repeat_ngram",
    None,
    "No sequence of so many tokens comes twice; default: the config's, if it has one.",
    lower_bound=1,
)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Below 1 sharpens the draw, above flattens.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Draw from so many tokens.", lower_bound=1)
_TOP_P = flags.DEFINE_float("top_p", None, "Draw from those of this probability together.")
_PROCESSORS: tuple[tuple[Any, Any], ...] = (
    (_NO_REPEAT_NGRAM, constraints.no_repeat_ngram),
    (_TEMPERATURE, sampling.temperature),
    (_TOP_K, sampling.top_k),
    (_TOP_P, sampling.top_p),
)
DECODING = (NUM_BEAMS, _LENGTH_PENALTY, _NO_REPEAT_NGRAM, _TEMPERATURE, _TOP_K, _TOP_P, SEED)
"""Flags that ``decoding`` reads."""
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, MEMBER, BASE, _NBEST, _MARKUP, *DECODING, launch.PLOT,
    *launch.PROCESSES,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    launch.keep_compiled()
    picture = launch.picture()
    sentences = list(arguments) or inputs.standard_input()
    marked = _read_markup(sentences) if _MARKUP.value else []
    _, task, params = open_run(TranslationTask)
    config = task.config
    if marked and getattr(task.model_config, "attention", "") is None:
        raise launch.Refused(
            "--markup follows words by cross-attention, which this model does not have."
        )
    options = {**config.evaluate.decoding.to_dict(), **decoding()}
    if _NO_REPEAT_NGRAM.value is not None:  # which is among the flags' processors
        options["no_repeat_ngram"] = None
    count = _NBEST.value or 1
    if count > options["num_beams"]:
        raise launch.Refused(
            f"--nbest is {count} of {options['num_beams']} beams; expected at most that, or "
            f"--num_beams={count}."
        )
    translator = task.translator(params, **options, **({"capture": Capture()} if marked else {}))
    if marked:
        sentences = [each.text for each in marked]
        attended, recipe = translator.attended(sentences), markup_recipe(config)
        translations = [text for text, _ in attended]
        lines = [
            carried(own, text, attention, recipe)
            for own, (text, attention) in zip(marked, attended, strict=True)
        ]
    else:
        hypotheses = translator.best(sentences, count)
        translations = [best[0][1] for best in hypotheses]
        scored = [f"{score:.4f}\t{text}" for best in hypotheses for score, text in best]
        lines = translations if _NBEST.value is None else scored
    if processes.is_main():
        print("\n".join(lines), flush=True)
    if translator.cut_sources and processes.is_main():
        print(
            f"note: {translator.cut_sources} of {len(sentences)} sentences were longer than "
            f"{config.data.source_len} tokens and were cut.",
            file=sys.stderr,
        )
    if picture:
        pairs = list(zip(sentences, translations, strict=True))
        draw(translator, pairs, stated_recipe(config), picture)
    return 0


def _read_markup(texts: Sequence[str]) -> list[markup.Marked]:
    """Returns the texts and their elements; refuses markup that is not closed."""
    if _NBEST.value is not None:
        raise launch.Refused("--markup writes the best text alone; leave --nbest out.")
    found = []
    for number, text in enumerate(texts, 1):
        try:
            found.append(markup.read(text))
        except markup.MarkupError as error:
            raise launch.Refused(f"text {number} of --markup: {error}") from None
    return found


def carried(marked: markup.Marked, text: str, attention: Attention, recipe: Recipe) -> str:
    """Returns the HTML of a translation, by the attention that a recipe reads."""
    return markup.write(marked, text, placed(marked, text, attention, recipe))


def decoding() -> dict[str, Any]:
    """Returns the decoding options of the flags, which override the config's.

    Raises:
      Refused: a value is out of range, or two searches are asked for at once.
    """
    given = [(flag, make) for flag, make in _PROCESSORS if flag.value is not None]
    try:
        options: dict[str, Any] = {"processors": [make(flag.value) for flag, make in given]}
    except ValueError as error:
        raise launch.Refused(str(error)) from None
    for flag in (NUM_BEAMS, _LENGTH_PENALTY):
        if flag.value is not None:
            options[flag.name] = flag.value
    if draws := [flag.name for flag, _ in given if flag is not _NO_REPEAT_NGRAM]:
        if options.setdefault("num_beams", 1) > 1:
            raise launch.Refused(
                f"--num_beams={NUM_BEAMS.value} searches and --{draws[0]} draws; give one of them."
            )
        options["key"] = jax.random.key(SEED.value)
    return options


def draw(translator, pairs: Sequence[tuple[str, str]], recipe: Recipe, path: Path) -> None:
    """Draws an alignment heatmap of each sentence pair, at most six; empty translations have none."""
    drawn = [(source, target) for source, target in pairs if target][:6]
    if not drawn:
        raise launch.Refused("every translation is empty, so there is no attention to draw.")
    attention = translator.attention(drawn)
    if not processes.is_main():
        return
    matrices = [recipe.token_weights(a.weights, len(a.target_tokens) - 1) for a in attention]
    figure = viz.gallery(
        matrices,
        [a.source_tokens for a in attention],
        [a.target_tokens[:-1] for a in attention],
        title=f"cross-attention: {recipe}",
    )
    viz.save(figure, path)


if __name__ == "__main__":
    launch.run(main)
