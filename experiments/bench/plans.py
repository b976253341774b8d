"""The table of plans: memory, communication and the bound of a step on accelerators.

    python -m experiments.bench.plans --folder=runs/plans
    python -m experiments.bench.plans configs/wmt14_de_en.py:big@h100:1x8,config.mesh.fsdp=2
    python -m experiments.bench.plans --only=t5_1b --only=published.*v5e:4x4

Each case is CONFIG@TOPOLOGY, with changes of the config's keys after commas; the word ``search`` takes the
best layout of ``experiments.plan --search``. Plans are kept in the folder, and not made again.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments import launch
from experiments.options import Options
from experiments.plan.report import amount, mesh_of

# Changes that let a model fit, or keep the rows of a device.
CASES = tuple(
    """
configs/wmt14_de_en.py:base@v5e:4x4
configs/wmt14_de_en.py:base@v5e:16x16,config.data.batch_size=3072
configs/wmt14_de_en.py:base@v5p:4x4x4,config.data.batch_size=768
configs/wmt14_de_en.py:base@h100:1x8
configs/wmt14_de_en.py:base@h100:8x8,config.data.batch_size=768
configs/wmt14_de_en.py:big@v5e:4x4
configs/wmt14_de_en.py:big@v5e:16x16,config.data.batch_size=3072
configs/wmt14_de_en.py:big@v5p:4x4x4,config.data.batch_size=768
configs/wmt14_de_en.py:big@h100:1x8
configs/wmt14_de_en.py:big@h100:8x8,config.data.batch_size=768
configs/t5_1b.py:v5e@v5e:4x4,config.model.remat=dots_with_no_batch_dims_saveable,config.train.accumulate=16
configs/t5_1b.py:v5e@v5e:4x4,config.model.remat=dots_with_no_batch_dims_saveable,config.train.accumulate=8
configs/t5_1b.py:v5e@v5e:16x16,config.model.remat=dots_with_no_batch_dims_saveable,config.train.accumulate=1
configs/t5_1b.py:v5p@v5p:4x4x4
configs/t5_1b.py:h100@h100:1x8
configs/t5_1b.py:h100@h100:8x8
configs/t5_11b.py:v5e@v5e:4x4,config.mesh.fsdp=16,config.mesh.tensor=1,config.train.accumulate=16
configs/t5_11b.py:v5e@v5e:16x16
configs/t5_11b.py:v5p@v5p:4x4x4
configs/t5_11b.py:h100@h100:1x8,config.train.accumulate=8
configs/t5_11b.py:h100@h100:8x8
experiments/bench/published.py:vit_b16@v5e:4x4,config.train.accumulate=4
experiments/bench/published.py:vit_b16@h100:1x8,config.train.accumulate=2
experiments/bench/published.py:perceiver_io@v5e:4x4,config.train.accumulate=8,config.model.remat=true
experiments/bench/published.py:perceiver_io@h100:1x8,config.train.accumulate=8
experiments/bench/published.py:llava_7b@v5e:4x4,config.train.accumulate=8
experiments/bench/published.py:llava_7b@h100:1x8
experiments/bench/published.py:whisper_large_v3@v5e:4x4,config.train.accumulate=2
experiments/bench/published.py:whisper_large_v3@h100:1x8
""".split()
)
_HEAD = ("config", "topology", "layout", "holds", "sends", "bound", "step", "MFU", "nothing hidden")


def main() -> None:
    """Makes missing plans, and prints the table."""
    parser = Options(__doc__)
    parser.add_argument("cases", nargs="*", help="CONFIG@TOPOLOGY[,KEY=VALUE..][,search]")
    parser.add_argument("--folder", type=Path, default=Path("runs/plans"), help="of the plans")
    parser.add_argument("--only", action="append", help="a regular expression found in cases")
    options = parser.parse_args()
    cases = options.cases or CASES
    if options.only:
        cases = [case for case in cases if any(re.search(one, case) for one in options.only)]
    for case in cases:
        if not re.fullmatch(r"[^@]+@[\w*]+:[\dx]+(,[^,]+)*", case):
            parser.error(f"got case {case!r}; expected CONFIG@TOPOLOGY, such as {CASES[0]}")
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| " + " | ".join(_HEAD) + " |")
    print("|" + "---|" * len(_HEAD))
    for case in cases:
        print(row(case, planned(case, options.folder)), flush=True)


def planned(case: str, folder: Path) -> dict[str, Any]:
    """Makes the plan of a case by ``experiments.plan --json``, with "error" if it was refused."""
    kept = folder / (re.sub(r"\W+", "_", case) + ".json")
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    config, _, rest = case.partition("@")
    topology, *changes = rest.split(",")
    command = [sys.executable, "-m", "experiments.plan", "--json"]
    command += [f"--config={config}", f"--topology={topology}"]
    command += ["--search" if word == "search" else f"--{word}" for word in changes]
    run = subprocess.run(command, capture_output=True, text=True)
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    if run.returncode not in (0, 2) or (run.returncode == 2 and not errors):
        raise RuntimeError(f"{' '.join(command)}: {run.stderr[-2000:]}")
    plan = json.loads(run.stdout) if run.stdout.strip() else {}
    if isinstance(plan, list):
        best = plan[0]
        plan = (best["plan"] or {}) | {"flags": best["flags"]}
    if run.returncode == 2:
        plan["error"] = errors[-1].removeprefix("error: ")
    plan.pop("collectives", None)
    kept.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    return plan


def row(case: str, plan: dict[str, Any]) -> str:
    """Formats a line of the table."""
    config, _, rest = case.partition("@")
    topology, *changes = rest.split(",")
    name = config.rpartition("/")[2].replace(".py", "").removeprefix("published:")
    if "error" in plan:
        return f"| {name} | {topology} | {' '.join(changes)} | {plan['error']} |" + " |" * 5
    layout = [mesh_of(plan["mesh"])]
    layout += [f"remat {plan['remat']}".lower()] if plan["remat"] else []
    layout += [f"accumulate {plan['accumulate']}"] if plan["accumulate"] > 1 else []
    memory = plan["memory"]
    cells = (
        name,
        topology,
        ", ".join(layout),
        f"{amount(memory['total'])} of {amount(memory['available'])}",
        amount(plan["sent"]),
        plan["bound"],
        f"{plan['step_seconds'] * 1e3:.1f} ms",
        f"{100 * plan['mfu']:.0f} %",
        f"{100 * plan['mfu_unhidden']:.0f} %",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    launch.script(main)
