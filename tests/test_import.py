"""Importing is cheap, and brings in nothing that only training needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 1.5
TRAINING = set(
    "optax orbax grain tensorflow_datasets ml_collections tokenizers matplotlib sacrebleu"
    " tensorboardX wandb".split()
)
PROGRAM = """
import json, sys, time
{before}
known, start = set(sys.modules), time.perf_counter()
import crossattn as xa
{access}
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({{name.split(".")[0] for name in set(sys.modules) - known}})]))
"""


def measure(before, access, tries=3):
    """The best time in seconds of several tries, and the packages that came in."""
    program = PROGRAM.format(before=before, access=access)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    best, packages = float("inf"), []
    for _ in range(tries):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        seconds, packages = json.loads(done.stdout.splitlines()[-1])
        best = min(best, seconds)
        if best < SECONDS:  # a busy machine deserves another try, a fast one needs none
            break
    return best, set(packages)


@pytest.mark.parametrize("access", ["", "xa.attend, xa.masks, xa.Memory"], ids=["alone", "attend"])
def test_import_costs_little_more_than_jax_and_brings_no_training_package(access):
    seconds, packages = measure("import jax", access)
    assert seconds < SECONDS
    assert packages & (TRAINING | {"flax"}) == set()


@pytest.mark.parametrize("access", ["xa.nn, xa.models, xa.decode, xa.init", "xa.viz"])
def test_models_and_decoding_cost_little_more_than_flax(access):
    # Flax itself imports optax, so it is counted with jax here.
    seconds, packages = measure("import jax; from flax import nnx", access)
    assert seconds < SECONDS
    assert packages & TRAINING == set()


def test_the_facade_lists_what_it_has_and_names_what_it_lacks():
    import crossattn as xa

    assert set(xa.__all__) <= set(dir(xa))
    for name in xa.__all__:
        if name not in ("train", "data", "viz"):  # these need the optional packages
            assert getattr(xa, name) is not None
    with pytest.raises(AttributeError, match="module 'crossattn' has no attribute 'atend'"):
        _ = xa.atend


def test_the_facade_tells_type_checkers_the_same_names():
    import ast

    import crossattn as xa

    tree = ast.parse(Path(xa.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {alias.asname: (line.module, alias.name) for line in block.body for alias in line.names}
    assert told.keys() | {"__version__"} == set(xa.__all__)
    for name, (module, attribute) in told.items():
        where = xa._LOCATIONS[name]
        assert where in (f"{module}:{attribute}", f"{module}.{attribute}"), name


def test_the_facade_of_data_lists_every_file_of_it():
    import pkgutil

    import crossattn as xa

    found = {module.name for module in pkgutil.iter_modules(xa.data.__path__)}
    assert set(xa.data.__all__) == found
