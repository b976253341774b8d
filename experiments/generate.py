"""Go on with texts from the command line or standard input, by a trained language model.

python -m experiments.generate --workdir=runs/lm "To insert a chart"
python -m experiments.generate --workdir=runs/lm "To insert a chart" --temperature=0.8 --max_new_tokens=40

A run of ``language_model`` or ``retrieval_language_model``. --temperature, --top_k and --top_p draw tokens;
without them the likeliest are searched for. Each text is printed with what follows it; "" begins one.
"""

from collections.abc import Sequence

from absl import flags

from crossattn.train import processes
from experiments import inputs, launch, translate
from experiments.runs import MEMBER, STEP, open_run
from experiments.tasks.language_model import LanguageModelTask

_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens",
    None,
    "The most tokens; default: as many as the run's texts have.",
    lower_bound=1,
)
FLAGS = (
    launch.CONFIG, launch.WORKDIR, STEP, MEMBER, _MAX_NEW_TOKENS, *translate.DECODING, *launch.PROCESSES,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    launch.keep_compiled()
    prompts = list(arguments) or inputs.standard_input()
    _, task, params = open_run(LanguageModelTask)
    texts = task.continued(params, prompts, _MAX_NEW_TOKENS.value, **translate.decoding())
    if processes.is_main():
        print("\n".join(texts), flush=True)
    return 0


if __name__ == "__main__":
    launch.run(main)
