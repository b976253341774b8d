"""What a run will need on accelerators that are not here: their own compilers compile its very step.

    python -m experiments.plan --config=configs/wmt14_de_en.py --topology=v5e:4x4

The one thing to know: ``prepare`` must run before JAX looks for devices, for a TPU's compiler would
otherwise ask the network whether it stands on one. Everything but the compiling stays on this CPU.
"""

import os
import sys

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",  # of XLA, errors alone
}


def prepare() -> None:
    """Set this process up to compile for devices that it has not got."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "jax" in sys.modules:  # which has read its variables
        sys.modules["jax"].config.update("jax_platforms", "cpu")


# Before JAX is imported, where this is a process of its own.
if sys.argv[:1] == ["-m"]:
    prepare()
