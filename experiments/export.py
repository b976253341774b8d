"""Writes a run that began from a checkpoint of ``transformers`` as one of theirs again, or a run as a delta.

    python -m experiments.export --workdir=runs/t5 --to=checkpoints/t5
    python -m experiments.export --workdir=runs/t5 --to=checkpoints/t5-best --step=best
    python -m experiments.export --workdir=runs/de --to=deltas/de --delta_of=runs/parent
    python -m experiments.export --workdir=runs/es --source_of=runs/de --to=runs/both --pairs=files:de_es.tsv

The folder has weights (safetensors, float32), config, settings of generation and tokenizer; ``xa.load`` and
``transformers`` read it. Of a delta it has ``delta.safetensors``, the parameters that differ from those of a
run or of published weights, with the run's config and assets: the launchers and ``config.init.from`` read it
with its base as the run, and ``xa.load(FILE, base=...)`` reads that of published weights. ``--source_of``
writes a delta too: the run with the source tokenizer and table of another run with the same parent, which
translates the other's source language without any training (Gheini et al. 2021).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from crossattn.functional import flatten, nest
from crossattn.train import processes, workdir
from crossattn.train.storage import Folder
from crossattn.weights import deltas
from experiments import launch
from experiments.runs import (
    BASE,
    DELTA,
    MEMBER,
    STEP,
    find_run,
    members_of,
    open_run,
    parameters_of,
    task_of,
)
from experiments.settings import put
from experiments.tasks import make_task

_TO = flags.DEFINE_string("to", None, "The folder, new or empty.")
_DELTA_OF = flags.DEFINE_string(
    "delta_of", None, "Write what differs from this run, or these weights, alone."
)
_SOURCE_OF = flags.DEFINE_string(
    "source_of", None, "Write the run with the source tokenizer and table of this run."
)
_PAIRS = flags.DEFINE_string("pairs", None, "Data of what --source_of writes, SOURCE/X-Y.")
FLAGS = (launch.WORKDIR, STEP, MEMBER, BASE, _TO, _DELTA_OF, _SOURCE_OF, _PAIRS)


def main(arguments: Sequence[str]) -> int:
    """Runs the command."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    launch.required_workdir()
    if not _TO.value:
        raise launch.Refused("--to is missing; name the folder to write, --to=checkpoints/NAME.")
    if bool(_SOURCE_OF.value) != bool(_PAIRS.value) or (_SOURCE_OF.value and _DELTA_OF.value):
        raise launch.Refused(
            "--source_of=RUN and --pairs=NAME are given together, and without --delta_of."
        )
    folder = Path(_TO.value)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise launch.Refused(
            f"--to is {folder}, which is there already; name a new or empty folder."
        )
    run, task, params = open_run()
    if task.checkpoint is None and not (_DELTA_OF.value or _SOURCE_OF.value):
        raise launch.Refused(
            f"the run in {run} has a model of its own ({task.config.model.name}), which is none of"
            " transformers'; only runs with config.model.name='pretrained' are exported, others as"
            " --delta_of=RUN."
        )
    if processes.is_main():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise launch.Refused(
                f"--to is {folder}, which cannot be made: {error.strerror}."
            ) from None
        launch.writable(folder / "config.json")
        if _SOURCE_OF.value and _PAIRS.value:
            given = (_SOURCE_OF.value, _PAIRS.value, folder / "assets")
            task, params = _with_source_of(task, params, run, *given)
            print(_write_delta(folder, task, params, str(run)))
            return 0
        if _DELTA_OF.value:
            print(_write_delta(folder, task, params, _DELTA_OF.value))
            return 0
        print(f"the checkpoint is in {task.checkpoint.export(folder, params)}")
    return 0


def _with_source_of(
    task: Any, params: Any, run: Folder, name: str, pairs: str, assets: Path
) -> tuple[Any, Any]:
    """Writes the tokenizers of the run that has another's source; returns its task and parameters."""
    place, own = find_run(name), flatten(params)
    if place is None:
        raise launch.Refused(f"--source_of is {name}, which is no run.")
    other, given = task_of(place), flatten(parameters_of(name))
    parents = [
        each.config.get("init", {}).get("from") or str(at)
        for each, at in ((task, run), (other, place))
    ]
    if parents[0] != parents[1]:
        raise launch.Refused(
            f"{run} begins from {parents[0]} and {place} from {parents[1]}, so their tables have nothing in"
            " common; name two children of one parent."
        )
    tables = {key: x for key, x in given.items() if key.startswith("source_")}
    fits = [key in own and x.shape[1:] == own[key].shape[1:] for key, x in tables.items()]
    if not tables or not all(fits):
        raise launch.Refused(
            f"{place} has no source table of its own that fits {run}; name children with"
            " tokenizer.joint=False and one model."
        )
    task.corpus.tokenizer = other.corpus.tokenizer
    task.save_assets(assets)
    put(task.config, {"data.name": pairs})
    return make_task(task.config, assets), nest({**own, **tables})


def _write_delta(folder: Path, task: Any, params: Any, source: str) -> str:
    """Writes a run as a delta of a source; returns what was written, in words."""
    if members_of(task.config):
        raise launch.Refused("the run is several, trained as one, of which no delta is written.")
    step = task.config.get("init", {}).get("step")
    params, base = jax.device_get((params, parameters_of(source, step)))
    delta = deltas.read(deltas.write(folder / DELTA, params, base))
    task.save_assets(folder / "assets")
    put(task.config, {"init.from": source})
    settings = workdir.flatten(task.config.to_dict())
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return (
        f"the delta is in {folder}: {len(delta.changed)} of {len(flatten(params))} parameters,"
        f" {deltas.share(delta, params):.1%} of the numbers"
    )


if __name__ == "__main__":
    launch.run(main)
