"""Plan a run on accelerators that are not here: their own compilers compile the step of ``train``.

    python -m experiments.plan --config=configs/wmt14_de_en.py --topology=v5e:4x4
    python -m experiments.plan --config=configs/wmt14_de_en.py --topology=h100:2x8 --config.mesh.fsdp=16
    python -m experiments.plan --config=configs/wmt14_de_en.py --topology=v5e:4x4 --search
    python -m experiments.plan --config=configs/wmt14_de_en.py --topology=v5e:2x2 --decode

Prints the memory of a device, the bytes that it sends by collective and mesh axis, the kernel of each
attention, and a roofline estimate of the step. Exit code 2 where it does not fit.
"""

import json
from collections.abc import Sequence

from absl import flags

from experiments import launch
from experiments.plan import decoding, report, search
from experiments.plan.compiling import DoesNotFit, compile_step, refuse_members
from experiments.plan.topologies import Topology, prepare, topology

_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Devices: v5e:4x4, v5p:4x4x4 (a slice), 2*v5e:16x16 (two slices); h100:2x8, b200:1x8 (hosts x devices).",
)
_DECODE = flags.DEFINE_bool("decode", False, "Plan greedy generation instead of training.")
_SEARCH = flags.DEFINE_bool(
    "search",
    False,
    "Try meshes, rematerialisation and accumulation, and print the best one's flags.",
)
_TRIES = flags.DEFINE_integer("tries", 4, "Of --search: programs to compile.", lower_bound=1)
_JSON = flags.DEFINE_bool("json", False, "Print JSON.")
FLAGS = (launch.CONFIG, _TOPOLOGY, _DECODE, _SEARCH, _TRIES, _JSON)


def main(arguments: Sequence[str]) -> int:
    """Runs the launcher."""
    if arguments:
        raise launch.Refused(f"got {' '.join(arguments)}; expected only flags, see --help.")
    config = launch.required_config()
    if _SEARCH.value and _DECODE.value:
        raise launch.Refused("--search lays out training; it was given with --decode.")
    for flag in (_SEARCH, _DECODE):
        if flag.value:
            refuse_members(config, f"--{flag.name}")
    if not _TOPOLOGY.value:
        raise launch.Refused("--topology is missing; name the devices, --topology=v5e:4x4.")
    prepare()
    return (_search if _SEARCH.value else _plan)(config, topology(_TOPOLOGY.value))


def _plan(config, devices: Topology) -> int:
    if _DECODE.value:
        plan = decoding.plan_decoding(config, devices)
        text, memory = decoding.text(plan), plan.memory
    else:
        plan = report.plan(compile_step(config, devices))
        text, memory = report.text(plan), plan.memory
    print(json.dumps(plan.as_dict(), indent=1) if _JSON.value else text, flush=True)
    if not memory.fits:
        raise DoesNotFit(memory.overfull(plan.chip))
    return 0


def _search(config, devices: Topology) -> int:
    tried = search.search(config, devices, _TRIES.value)
    shown = json.dumps(search.as_dicts(tried), indent=1) if _JSON.value else search.text(tried)
    print(shown, flush=True)
    if tried[0].plan is None:
        raise DoesNotFit("no layout that was tried fits; take fewer rows, or more devices.")
    return 0
