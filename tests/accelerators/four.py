"""A program that compiles for four v5e and prints the error of each thing that it compiles, "" for none.

python -m tests.accelerators.four models       gradients of every model, its parameters split
python -m tests.accelerators.four configs      the plan of every config's tiny variant
python -m tests.accelerators.four attention    gradients of every kind of attention
"""

import importlib
import json
import sys
from pathlib import Path

import jax

from experiments.plan import report
from experiments.plan.compiling import compile_step, compiled_for
from experiments.plan.topologies import prepare, topology

prepare()  # before JAX looks for devices

import crossattn as xa  # noqa: E402
from crossattn.train.sharding import (  # noqa: E402
    MeshConfig,
    batch_sharding,
    make_mesh,
    params_sharding,
)
from tests.accelerators import attention  # noqa: E402
from tests.models import every_model  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "configs"


def compile_model(name, devices):
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), devices.devices)
    build = every_model.build_of(name)
    places = params_sharding(xa.functional.shapes(build), xa.functional.logical_axes(build), mesh)
    params = jax.tree.map(placed, xa.functional.shapes(build), places)
    given = every_model.example(name, 4)
    given = {key: placed(x, batch_sharding(x.shape, mesh)) for key, x in given.items()}
    run = jax.jit(jax.value_and_grad(lambda p, x: every_model.loss(name, p, x)))
    compiled, _ = compiled_for(devices, run, params, given)
    assert ("tpu_custom_call" in compiled.as_text()) == every_model.attends(name)


def compile_config(name, devices):
    config = importlib.import_module(f"configs.{name}").get_config("tiny")
    plan = report.plan(compile_step(config, devices))
    assert plan.memory.fits and report.text(plan)


def placed(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def configs():
    names = sorted(path.stem for path in CONFIGS.glob("*.py"))
    return [n for n in names if hasattr(importlib.import_module(f"configs.{n}"), "get_config")]


def fault(compile, name, devices):
    try:
        compile(name, devices)
    except Exception as error:
        return f"{type(error).__name__}: {error}" or "failed"
    return ""


KINDS = {
    "models": (compile_model, every_model.NAMES),
    "configs": (compile_config, configs()),
    "attention": (attention.compile_kind, attention.KINDS),
}

if __name__ == "__main__":
    compile, names = KINDS[sys.argv[1]]
    devices = topology("v5e:2x2")
    print(json.dumps({name: fault(compile, name, devices) for name in names}))
