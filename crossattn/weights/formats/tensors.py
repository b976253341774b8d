"""Between a checkpoint's tensors and a model's parameters: read, checked, and seen as tensors again."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import functional
from crossattn.types import Params
from crossattn.weights.formats.safetensors import CheckpointError, TensorFiles
from crossattn.weights.rules import Part, Rules, tensor_shapes
from crossattn.weights.settings import buildable

Place = Callable[[tuple[str | None, ...], tuple[int, ...]], jax.sharding.Sharding]
"""(logical axes, shape) of a parameter -> where it lives; ``train.sharding.placement`` makes one."""


@dataclass(frozen=True)
class Layout:
    """A checkpoint's files without the parameters: enough to write the same files again.

    Attributes:
      files: file -> its tensors' names -> those names in the family's rules.
      headers: file -> its header, with its metadata and the order of its tensors.
      index: the index, where there are several files.
      kept: tensors that nothing computes with, and those that differ in the last bits from what the
        model computes itself.
      constants: shape and dtype of the tensors that are what it computes, to the bit.
      originals: tensors that JAX holds with fewer bits (float64, unless ``jax_enable_x64``) or that repeat
        others in other bits (another type, another zero); and the type that their parameters have.
      beside: other files of the folder, a tokenizer's above all.
    """

    files: Mapping[str, Mapping[str, str]]
    headers: Mapping[str, bytes] = field(default_factory=dict)
    index: bytes | None = None
    kept: Mapping[str, np.ndarray] = field(default_factory=dict)
    constants: Mapping[str, tuple[tuple[int, ...], np.dtype]] = field(default_factory=dict)
    originals: Mapping[str, tuple[np.ndarray, np.dtype]] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)

    def restored(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """A file's tensor as it was there, but for what has changed since."""
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
    """Every tensor, read once and put where its parameters live.

    Args:
      build: makes the module.
      rules: where each of its parameters is.
      files: the checkpoint.
      names: the files' names -> the rules'.
      place: see ``load``.
      finish: what becomes of each parameter once it is placed; it is not saved again.

    Raises:
      CheckpointError: tensors are missing, unexpected, misshaped, or not what they must be.
    """
    with buildable():
        shapes = functional.flatten(functional.shapes(build))
    axes = functional.flatten(functional.logical_axes(build))
    owners: dict[str, list[tuple[str, Part]]] = {}
    for path in shapes:
        part = rules.tensor_of(path)
        owners.setdefault(part.module, []).append((path, part))
    _check_names(rules, files, names, tensor_shapes(rules, shapes, axes))

    originals = _check_repeated(rules, files, names, set(owners))
    constants, kept = _check_computed(rules, files, names, set(owners))

    flat: dict[str, Any] = {}
    for name, tensor in files.read(set(names)):
        known = names[name]
        if known in owners and not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise CheckpointError(
                f"{name} in {files.folder} has dtype {tensor.dtype}; expected floating-point numbers; "
                "save it unquantised."
            )
        for path, part in owners.get(known, ()):
            piece = rules.to_param(
                path, rules.part(path, tensor, part), shapes[path].shape, axes[path]
            )
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
        files.index,
        kept,
        constants,
        originals,
    )
    return params, layout


def _check_names(
    rules: Rules, files: TensorFiles, names: dict[str, str], expected: dict[str, tuple[int, ...]]
) -> None:
    """Every tensor is used, and every parameter has one of its shape."""
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
    """Tensors that repeat others must say the same. Both are read here, before anything is placed.

    Returns those that say it in other bits, see ``Layout.originals``.
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
) -> tuple[dict[str, tuple[tuple[int, ...], np.dtype]], dict[str, np.ndarray]]:
    """Tensors that the model computes must say the same: the ``constants`` and ``kept`` of a layout."""
    constants, kept = {}, {}
    computed = {n for n, known in names.items() if rules.constant(known) and known not in owned}
    for name, tensor in files.read(computed):
        known = names[name]
        wanted = rules.constant(known)(tensor.shape).astype(tensor.dtype)
        if not np.allclose(tensor, wanted, atol=1e-5):
            raise CheckpointError(
                f"{name} in {files.folder} is not what the model computes, as it must be."
            )
        if tensor.tobytes() == wanted.tobytes():
            constants[known] = (tensor.shape, tensor.dtype)
        else:
            kept[known] = tensor
    return constants, kept


class Tensors(Mapping[str, np.ndarray]):
    """Parameters (or their gradients) seen as a checkpoint's tensors; each is made when asked for."""

    def __init__(self, rules: Rules, flat: Mapping[str, Any], axes: Mapping[str, tuple]):
        self.rules, self.flat, self.axes = rules, flat, axes
        self.paths: dict[str, list[str]] = {}
        for path in flat:
            self.paths.setdefault(rules.tensor_of(path).module, []).append(path)

    @classmethod
    def of(cls, model: Any, params: Params) -> "Tensors":
        """Those of a ``Pretrained`` model.

        Raises:
          CheckpointError: parameters are quantised, which no checkpoint of the family can hold.
        """
        if any(map(functional.is_quantized, functional.flatten(params).values())):
            raise CheckpointError(
                "params are quantised, and checkpoints are not; give those that quantize() was given."
            )
        axes = functional.flatten(functional.logical_axes(model))
        return cls(model.rules, functional.flatten(params), axes)

    def __contains__(self, name: object) -> bool:
        return name in self.paths

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, name: str) -> np.ndarray:
        ordered = sorted(self.paths[name], key=lambda path: self.rules.tensor_of(path).index)
        parts = [
            self.rules.to_tensor(path, np.asarray(self.flat[path]), self.axes[path])
            for path in ordered
        ]
        return self.rules.whole(ordered[0], parts)

    def saved(self, name: str, layout: Layout) -> np.ndarray:
        """The tensor that a file holds under this name, be it a parameter or not."""
        if name in self:
            return self[name]
        if name in layout.constants:
            shape, dtype = layout.constants[name]
            return self.rules.constant(name)(shape).astype(dtype)
        if name in layout.kept:
            return layout.kept[name]
        same = self.rules.aliases.get(name) or self.rules.beside[name]
        if isinstance(same, str):
            return self[same]
        return self.rules.constant(name)(same).astype(np.float32)
