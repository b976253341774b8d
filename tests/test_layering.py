"""Imports go strictly downward. This file reads them from the source and fails when one goes up."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FREE = {"types", "functional", "axes", "rows", "files"}  # everybody may import them
MODELS = {"ops", "nn", "models"}
BELOW = {
    "types": set(),
    "axes": set(),
    "rows": {"axes"},
    "files": set(),
    "functional": {"types"},
    "ops": {"ops"} | FREE,
    "nn": {"ops", "nn"} | FREE,
    "models": MODELS | FREE,
    "interventions": {"interventions", "ops", "nn"} | FREE,
    "analysis": {"analysis", "interventions"} | MODELS | FREE,
    "decode": {"decode"} | MODELS | FREE,
    "weights": {"weights", "decode"} | MODELS | FREE,
    "viz": {"viz"} | MODELS | FREE,
    "train": {"train"} | FREE,
    "data": {"data", "files"},
    "testing": {"testing", "ops"} | FREE,  # in nobody else's list: the library does not need it
    "pytest_plugin": {"testing"},
    "__main__": {"", "ops"},
    "": set(),  # the facade finds the others by name, on first use
}
CONFIG_NEEDS = {"ml_collections", "configs", "collections", "typing"}
CORE = (
    FREE
    | MODELS
    | {"interventions", "analysis", "decode", "testing", "pytest_plugin", "__main__", ""}
)
NO_FLAX = {"ops", "testing", "pytest_plugin", "__main__"}
CORE_NEEDS = {"jax", "flax", "jaxtyping", "numpy"}  # numpy comes with jax


def part_of(module):
    """The folder or file of the library that a module belongs to: "crossattn.nn.stack" -> "nn"."""
    return module.split(".")[1] if "." in module else ""


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source, module, is_package=False):
    """The full names of what a module imports, wherever in the file it does.

    What the facade imports for type checkers alone is no import.
    """
    tree = ast.parse(source)
    if not part_of(module) and is_package:
        tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node)[:20]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - node.level + is_package] if node.level else []
            base += [node.module] if node.module else []
            # "from crossattn import nn" imports crossattn.nn
            yield from (".".join([*base, alias.name]) for alias in node.names)


def violations(source, module, is_package=False):
    """Sentences about imports that this module must not have."""
    top, found = module.split(".")[0], []
    for name in imports(source, module, is_package):
        first = name.split(".")[0]
        if first == "crossattn" and top == "crossattn":
            if part_of(name) not in BELOW.get(part_of(module), set()):
                found.append(f"{module} imports {name}, which is not below it")
        elif first in ("experiments", "configs", "tests") and top == "crossattn":
            found.append(f"{module} imports {name}: the library knows no experiment")
        elif first == "tests":
            found.append(f"{module} imports {name}: tests are not part of the product")
        if top == "configs" and first not in CONFIG_NEEDS:
            found.append(f"{module} imports {name}: a config holds only values")
        if top == "crossattn" and part_of(module) in CORE:
            known = CORE_NEEDS | {"crossattn"} | sys.stdlib_module_names
            if module in ("crossattn.pytest_plugin", "crossattn.testing.as_tests"):
                known |= {"pytest"}  # which loads them; nothing else does
            if first not in known or (part_of(module) in NO_FLAX and first == "flax"):
                found.append(f"{module} imports {name}, which the core must do without")
    return found


FILES = sorted(
    p for top in ("crossattn", "experiments", "configs") for p in ROOT.glob(f"{top}/**/*.py")
)


def test_no_import_goes_up():
    found = []
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        found += violations(source, name_of(path), path.name == "__init__.py")
    assert found == []


def test_no_private_module_of_another_package_is_imported():
    found = set()
    for path in FILES:
        module, own = name_of(path), ("crossattn.", "experiments.", "configs.", "__future__")
        for name in imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
            if not name.startswith(own) and any(part.startswith("_") for part in name.split(".")):
                found.add(module)
    assert not found


def test_every_part_of_the_library_stands_on_a_floor():
    parts = {part_of(name_of(path)) for path in FILES if name_of(path).startswith("crossattn")}
    assert parts <= BELOW.keys(), "say in BELOW what the new part may import"


UP = [
    ("crossattn.ops.attend", "from crossattn.nn import MultiHeadAttention"),
    ("crossattn.ops.attend", "from ..nn import layers"),
    ("crossattn.ops.attend", "def f():\n    import crossattn.models.decoder"),
    ("crossattn.ops.attend", "import crossattn as xa"),
    ("crossattn.nn.stack", "import optax"),
    ("crossattn.decode.search.beam", "from crossattn.viz import alignment"),
    ("crossattn.train.loop", "from crossattn.models import Transformer"),
    ("crossattn.data.pipeline", "from crossattn.types import Array"),
    ("crossattn.viz.heads", "from experiments import train"),
    ("crossattn", "import crossattn.nn"),
    ("crossattn.testing.checks", "import pytest"),
    ("crossattn.testing.checks", "from flax import nnx"),
    ("configs.copy_task", "from crossattn.models import Transformer"),
    ("experiments.train", "from tests import numpy_model"),
]
DOWN = [
    ("crossattn.models.decoder", "from crossattn.nn.sublayers import BlockConfig"),
    ("crossattn.ops.attend", "from . import masks\nfrom .backends import reference"),
    ("experiments.train", "from crossattn import train, models\nfrom absl import app"),
]


def test_an_import_that_goes_up_is_found_and_one_that_goes_down_is_not():
    assert [source for module, source in UP if not violations(source, module)] == []
    assert [source for module, source in DOWN if violations(source, module)] == []
