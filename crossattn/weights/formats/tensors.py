"""Reads the tensors of a checkpoint as parameters of a model, and shows parameters as tensors."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import functional
from crossattn.types import Params
from crossattn.weights.formats.safetensors import INDEX, CheckpointError, TensorFiles
from crossattn.weights.rules import Rules
from crossattn.weights.settings import buildable

Place = Callable[[tuple[str | None, ...], tuple[int, ...]], jax.sharding.Sharding]
"""(logical axes, shape) of a parameter -> its sharding; ``train.sharding.placement`` makes one."""


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint without the parameters, from which the same files are written again.

    Attributes:
      files: file -> its tensors' names -> those names in the family's rules.
      headers: file -> its header, with its metadata and the order of its tensors.
      kept: tensors that are no parameters: those that the model computes itself or does not read.
      originals: tensors that JAX holds with fewer bits (float64, unless ``jax_enable_x64``) or that repeat
        others in other bits (another type, another zero); and the dtype of their parameters.
      beside: other files of the folder: the index of several files, a tokenizer's.
    """

    files: Mapping[str, Mapping[str, str]]
    headers: Mapping[str, bytes] = field(default_factory=dict)
    kept: Mapping[str, np.ndarray] = field(default_factory=dict)
    originals: Mapping[str, tuple[np.ndarray, np.dtype]] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)

    def restored(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Returns a file's tensor as it was there, with the values that have changed since."""
        was, dtype = self.originals.get(name, (tensor, None))
        if was.shape != tensor.shape or tensor.dtype != dtype:
            return tensor
        loaded = was.astype(dtype)
        same = (loaded == tensor) | ((loaded != loaded) & (tensor != tensor))
        return np.where(same, was, tensor.astype(was.dtype))


def read(
    build: functional.Build,
    rules: Rules,
    files: TensorFiles,
    names: dict[str, str],
    place: Place | None,
    finish: Callable[[str, jax.Array], Any] | None = None,
) -> tuple[Params, Layout]:
    """Reads every tensor once, and places its parameters; ``names`` are the files' -> the rules'.

    ``finish`` maps (path, placed parameter) to the final one, which cannot be saved again.

    Raises:
      CheckpointError: tensors are missing, unexpected or misshaped, or have wrong values.
    """
    with buildable():
        shapes = functional.flatten(functional.shapes(build))
    axes = functional.flatten(functional.logical_axes(build))
    owners = _paths(rules, shapes)
    _check_names(rules, files, names, rules.shapes(shapes, axes))
    originals = _check_repeated(rules, files, names, set(owners))
    kept = _check_computed(rules, files, names, set(owners))

    flat: dict[str, Any] = {}
    for name, tensor in files.read(set(names)):
        known = names[name]
        if known in owners and not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise CheckpointError(
                f"{name} in {files.folder} has dtype {tensor.dtype}; expected floating-point numbers; "
                "save it unquantised."
            )
        for path in owners.get(known, ()):
            piece = rules.to_param(path, tensor, shapes[path].shape, axes[path])
            where = None if place is None else place(axes[path], piece.shape)
            param = jax.device_put(np.asarray(piece, order="C"), where)
            flat[path] = param if finish is None else finish(path, param)
            if finish is None and param.dtype != tensor.dtype:
                originals[name] = tensor, np.dtype(param.dtype)
        if rules.is_unused(known) and known not in owners:
            kept[known] = tensor
    params = functional.nest({path: flat[path] for path in shapes})
    layout = Layout(
        {shard.file: {name: names[name] for name in shard.shapes} for shard in files.shards},
        {shard.file: shard.header for shard in files.shards},
        kept,
        originals,
        {} if files.index is None else {INDEX: files.index},
    )
    return params, layout


def _paths(rules: Rules, flat: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns tensors -> the paths of their parameters, in the order of their parts."""
    paths: dict[str, list[str]] = {}
    for path in sorted(flat, key=lambda path: rules.tensor_of(path).index):
        paths.setdefault(rules.tensor_of(path).module, []).append(path)
    return paths


def _check_names(
    rules: Rules, files: TensorFiles, names: dict[str, str], expected: dict[str, tuple[int, ...]]
) -> None:
    """Checks that every tensor is used, and that every parameter has one of its shape."""
    shapes = {names[name]: shape for name, shape in files.shapes.items()}
    twice = sorted(name for name, count in Counter(names.values()).items() if count > 1)
    wrong = [f"two tensors for {name}" for name in twice]
    wrong += [f"missing {name}" for name in sorted(expected.keys() - shapes.keys())]
    wrong += [
        f"unexpected {name}"
        for name in sorted(shapes.keys() - expected.keys())
        if not (name in rules.aliases or rules.constant(name) or rules.is_unused(name))
    ]
    wrong += [
        f"{name} is {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if wrong:
        raise CheckpointError(
            f"the tensors in {files.folder} do not fit its config.json: {'; '.join(wrong)}."
        )


def _check_repeated(
    rules: Rules, files: TensorFiles, names: dict[str, str], owned: set[str]
) -> dict[str, tuple[np.ndarray, np.dtype]]:
    """Checks that tensors equal those that they repeat, before anything is placed.

    Returns the repetitions in other bits, see ``Layout.originals``.
    """
    differ = {}
    file_names = {known: name for name, known in names.items()}
    repeated = {n for n, known in names.items() if known in rules.aliases and known not in owned}
    for name, tensor in files.read(repeated):
        original = rules.aliases[names[name]]
        [(_, wanted)] = files.read({file_names[original]})
        if not np.array_equal(tensor, wanted):
            raise CheckpointError(
                f"{name} in {files.folder} is not the same as {original}, as it must be."
            )
        if tensor.dtype != wanted.dtype or tensor.tobytes() != wanted.tobytes():
            differ[name] = tensor, np.dtype(jax.dtypes.canonicalize_dtype(wanted.dtype))
    return differ


def _check_computed(
    rules: Rules, files: TensorFiles, names: dict[str, str], owned: set[str]
) -> dict[str, np.ndarray]:
    """Checks the tensors that the model computes itself, and returns them."""
    kept: dict[str, np.ndarray] = {}
    computed = {n for n, known in names.items() if rules.constant(known) and known not in owned}
    for name, tensor in files.read(computed):
        wanted = rules.constant(names[name])(tensor.shape).astype(tensor.dtype)
        if not np.allclose(tensor, wanted, atol=1e-5):
            raise CheckpointError(
                f"{name} in {files.folder} is not what the model computes, as it must be."
            )
        # The layers of early GPT-2 files repeat one mask, of which one copy is kept.
        same = (x for x in kept.values() if x.dtype == tensor.dtype and np.array_equal(x, tensor))
        kept[names[name]] = next((x for x in same if x.tobytes() == tensor.tobytes()), tensor)
    return kept


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of parameters, or of their gradients; each is made when it is read."""

    def __init__(self, rules: Rules, flat: Mapping[str, Any], axes: Mapping[str, tuple]):
        self.rules, self.flat, self.axes = rules, flat, axes
        self.paths = _paths(rules, flat)

    @classmethod
    def of(cls, model: Any, params: Params) -> "Tensors":
        """Returns the tensors of a ``Pretrained`` model.

        Raises:
          CheckpointError: parameters are quantised.
        """
        flat = functional.flatten(params)
        if any(map(functional.is_quantized, flat.values())):
            raise CheckpointError(
                "params are quantised, and checkpoints are not; give those that quantize() was given."
            )
        axes = functional.flatten(functional.logical_axes(model))
        return cls(model.rules, flat, axes)

    def __contains__(self, name: object) -> bool:
        return name in self.paths

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, name: str) -> np.ndarray:
        paths = self.paths[name]
        parts = [self.rules.to_tensor(p, np.asarray(self.flat[p]), self.axes[p]) for p in paths]
        return self.rules.joined(paths[0], parts)

    def saved(self, name: str, layout: Layout) -> np.ndarray:
        """Returns the tensor that a file has under this name."""
        if name in self:
            return self[name]
        if name in layout.kept:
            return layout.kept[name]
        same = self.rules.aliases.get(name) or self.rules.beside[name]
        if isinstance(same, str):
            return self[same]
        return self.rules.constant(name)(same).astype(np.float32)
