"""The demo: train a translator on real text, score it, draw its attention, all in one command.

    python -m experiments.demo --workdir=runs/demo

English to French on the LibreOffice help; where its packages cannot be had, Greek to English. One head learns
word links that an HMM counts on the same texts (``loss.alignment``), and is the one that is drawn.
Interrupted, the same command goes on; finished, it says where the results are.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs import greek_english, libreoffice
from crossattn.data.errors import DataUnavailable
from crossattn.data.sources import open_source
from crossattn.train import storage
from experiments import launch, report, train, translate
from experiments.runs import parameters
from experiments.settings import saved_config
from experiments.tasks import make_task
from experiments.tasks.alignment import stated_recipe

_PICTURED = 4
FLAGS = (launch.WORKDIR,)


def main(arguments: Sequence[str]) -> int:
    """Trains, scores and draws; or shows the results of a finished run."""
    workdir = storage.folder(launch.WORKDIR.value or "runs/demo")
    if not isinstance(workdir, Path):
        raise launch.Refused(
            f"the work directory is {workdir}; the demo draws pictures into a folder of this machine, "
            "--workdir=runs/demo."
        )
    finished = workdir / "results-test.json"
    if finished.exists():
        print(f"The run in {workdir} is finished; its results:")
        _show(json.loads(finished.read_text(encoding="utf-8")), workdir)
        return 0
    config = _config(workdir)
    result = train.run(config, workdir)
    if result.status == "interrupted":
        print("run `make demo` again to go on.")
        return 130
    task = make_task(config, workdir / "assets")
    params = parameters(task, workdir)
    print("translating and aligning the test split ...", flush=True)
    results = task.report(params, "test")
    results |= {f"training_{name}": value for name, value in result.totals.items()}
    report.save(results, workdir / "results-test.partial.json")
    _draw(task, params, results, workdir / "alignments.png")
    (workdir / "results-test.partial.json").rename(finished)
    _show(results, workdir)
    return 0


def _config(workdir: Path) -> Any:
    """Returns the config of the run, or the first one with available data."""
    if (workdir / "config.json").exists():
        return saved_config(workdir)
    config = libreoffice.get_config()
    try:
        open_source(config.data.name)
    except DataUnavailable as reason:
        print(f"{reason} Training Greek to English instead.", flush=True)
        config = greek_english.get_config()
    config.loss.alignment = "hmm"
    return config


def _draw(task: Any, params: Any, results: Mapping[str, Any], path: Path) -> None:
    """Draws alignments of short test sentences."""
    samples = [
        (sample["source"], sample["translation"])
        for sample in results["samples"]
        if 4 <= len(sample["source"].split()) <= 12 and sample["translation"]
    ]
    if not samples:
        print("no translation is short enough to draw; alignments.png is left out.", flush=True)
        return
    step = max(len(samples) // _PICTURED, 1)
    recipe = stated_recipe(task.config)
    translate.draw(task.translator(params), samples[::step][:_PICTURED], recipe, path)


def _show(results: Mapping[str, Any], workdir: Path) -> None:
    """Prints a table, and three translated sentences."""
    links = "" if results["aer"] is None else f"against {results['links_count']} {results['links']}"
    tokens_per_second = results["training_tokens"] / max(results["training_train_seconds"], 1e-9)
    rows = [
        ("test sentences", str(results["sentences"]), ""),
        ("BLEU", f"{results['bleu']:.1f}", results["bleu_signature"]),
        ("chrF", f"{results['chrf']:.1f}", results["chrf_signature"]),
        ("AER", "-" if results["aer"] is None else f"{results['aer']:.1f}", links),
        ("tokens/s", f"{tokens_per_second:,.0f}", "target tokens, in training"),
        ("training", f"{results['training_train_seconds'] / 60:.1f} min", ""),
        ("compiling", f"{results['training_compile_seconds']:.0f} s", ""),
    ]
    print()
    for name, value, remark in rows:
        print(f"  {name:<15} {value:>9}  {remark}".rstrip())
    print(f"\n  checkpoints, metrics.jsonl, tensorboard, alignments.png: {workdir}\n")
    samples = results["samples"]
    for sample in samples[:: max(len(samples) // 3, 1)][:3]:
        print(f"  source       {sample['source']}")
        print(f"  translation  {sample['translation']}")
        print(f"  reference    {sample['reference']}\n")


if __name__ == "__main__":
    launch.run(main)
