"""Go on with texts from the command line or standard input, by a trained language model.

python -m experiments.generate --workdir=runs/lm "To insert a chart"
python -m experiments.generate --workdir=runs/lm "To insert a chart" --temperature=0.8 --max_new_tokens=40
python -m experiments.generate --workdir=runs/retro "To insert a chart" --plot=passages.png

A run of ``language_model`` or ``retrieval_language_model``. --temperature, --top_k and --top_p draw tokens;
without them the likeliest are searched for. Each text is printed with what follows it; "" begins one. --plot
draws the passages that the tokens after its last whole chunk read, each word as dark as the attention to it.
"""

from collections.abc import Sequence
from typing import Any

from absl import flags

from crossattn import viz
from crossattn.train import processes
from experiments import inputs, launch, translate
from experiments.runs import MEMBER, STEP, open_run
from experiments.tasks.language_model import LanguageModelTask
from experiments.tasks.retrieval_language_model import Passage, RetrievalLanguageModelTask

_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens",
    None,
    "The most tokens; default: as many as the run's texts have.",
    lower_bound=1,
)
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, MEMBER, _MAX_NEW_TOKENS, *translate.DECODING, launch.PLOT,
    *launch.PROCESSES,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    launch.keep_compiled()
    prompts = list(arguments) or inputs.standard_input()
    picture = launch.picture()
    kind = RetrievalLanguageModelTask if picture else LanguageModelTask
    _, task, params = open_run(kind)
    texts = task.continued(params, prompts, _MAX_NEW_TOKENS.value, **translate.decoding())
    if processes.is_main():
        print("\n".join(texts), flush=True)
    if picture:
        figure = draw([task.passages(params, text) for text in texts])
        if processes.is_main():
            viz.save(figure, picture)
    return 0


def draw(read: Sequence[tuple[str, str, Sequence[Passage]]]) -> Any:
    """Draws the passages that each text reads, below its last chunk and what follows."""
    passages, titles = [], []
    for chunk, rest, found in read:
        for number, passage in enumerate(found, 1):
            said = f"{passage.mass:.0%} of the attention, {passage.slope:+.2f} nats"
            begins = f"{chunk} ▸ {rest} – " if number == 1 else ""
            passages.append(passage)
            titles.append(f"{begins}Passage {number}: {said}")
    words, weights = [each.words for each in passages], [each.read for each in passages]
    return viz.texts(words, weights, titles=titles)


if __name__ == "__main__":
    launch.run(main)
