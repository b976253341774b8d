"""Plan a run on accelerators that are not here: their own compilers compile the very step of ``train``.

    python -m experiments.plan --config=configs/wmt14_de_en.py --topology=v5e:4x4
    python -m experiments.plan --config=configs/wmt14_de_en.py --topology=h100:2x8 --config.mesh.fsdp=16

It prints what a device holds, what it sends by collective and mesh axis, which kernel computes each
attention, and a roofline estimate of the step. Exit code 2 where it does not fit.
"""

import json
from collections.abc import Sequence

from absl import flags

from experiments import launch
from experiments.plan import report
from experiments.plan.compiling import DoesNotFit, compile_step
from experiments.plan.topologies import TopologyError, prepare, topology

_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Devices: v5e:4x4, v5p:4x4x4, v6e:4x4 (a slice); h100:2x8, h200:1x8 (hosts x devices).",
)
_JSON = flags.DEFINE_bool("json", False, "Print JSON.")
FLAGS = (launch.CONFIG, _TOPOLOGY, _JSON)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    config = launch.required_config()
    if not _TOPOLOGY.value:
        raise launch.Refused("--topology is missing; name the devices, --topology=v5e:4x4.")
    prepare()
    try:
        return _plan(config, _TOPOLOGY.value)
    except (TopologyError, DoesNotFit, ValueError) as error:
        raise launch.Refused(f"{error}") from error


def _plan(config, name: str) -> int:
    plan = report.plan(compile_step(config, topology(name)))
    print(json.dumps(plan.as_dict(), indent=1) if _JSON.value else report.text(plan), flush=True)
    if not plan.memory.fits:
        raise DoesNotFit(report.overfull(plan))
    return 0
