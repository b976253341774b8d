"""Rules from our parameters to a checkpoint's tensors: names, and how each array is laid out.

A rule pairs one of our modules with one of theirs, ``{}`` standing for the number of the layer; what
the module holds follows from the names of its parameters. Every parameter has exactly one tensor, and every
tensor must be accounted for.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from crossattn.weights.formats.safetensors import CheckpointError

Shape = tuple[int, ...]
Constant = Callable[[Shape], np.ndarray]

_LEAVES = {"kernel": "weight", "scale": "weight", "table": "weight", "bias": "bias"}


@dataclass(frozen=True)
class Part:
    """A module whose tensors are one of several equal parts, side by side, of larger ones."""

    module: str
    index: int
    count: int


class Names(frozenset[str]):
    """The names of a checkpoint's tensors, and their types where they are known ("F32", "BF16")."""

    dtypes: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def typed(cls, dtypes: Mapping[str, str]) -> "Names":
        """Names with their types."""
        names = cls(dtypes)
        names.dtypes = dtypes
        return names

    def within(self, module: str) -> "Names":
        """Those inside a module, as it would call them itself."""
        start = f"{module}."
        return Names(name.removeprefix(start) for name in self if name.startswith(start))

    def has(self, module: str, kind: str, needs: Sequence[str], may: Sequence[str] = ()) -> bool:
        """Whether a model of the class ``kind`` has a module.

        Args:
          module: of the model.
          kind: "" where nothing says it.
          needs: classes that have it.
          may: classes that have it, but in some files.
        """
        return kind in needs or any(name.startswith(f"{module}.") for name in self)


class AllNames(Names):
    """The names of a checkpoint that is not there yet: whatever its config allows."""

    def __contains__(self, name: object) -> bool:
        return True

    def within(self, module: str) -> Names:
        return self

    def has(self, module: str, kind: str, needs: Sequence[str], may: Sequence[str] = ()) -> bool:
        return not kind or kind in (*needs, *may)


@dataclass(frozen=True)
class Rules:
    """How one family of models names and lays out its tensors.

    Attributes:
      names: our module -> theirs; or one of our parameters -> the full name of its tensor.
      aliases: their tensor -> the one that it repeats where a file has both.
      constants: pattern -> what the tensor must hold; the model computes it itself.
      unused: patterns of tensors that nothing computes with; kept for saving.
      beside: of those and of the constants, what ``transformers`` misses in a file: the tensor that it is a
        copy of in the file of a fresh model, or the shape of a constant.
      rows: parameters [X] whose tensors are [1, X].
      flat: parameters [1, X] whose tensors are [X].
      pointwise: kernels whose tensors are convolutions of one pixel, [out, in, 1, 1].
      untransposed: patterns of kernels whose dense weights are [in, out]; others are [out, in], as PyTorch
        has them.
    """

    names: Mapping[str, str | Part]
    aliases: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Constant] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    beside: Mapping[str, str | Shape] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    pointwise: tuple[str, ...] = ()
    untransposed: tuple[str, ...] = ()

    def __or__(self, other: "Rules") -> "Rules":
        """Both families' rules; they have no name in common."""
        joined: dict[str, Any] = {}
        for own in fields(self):
            a, b = getattr(self, own.name), getattr(other, own.name)
            joined[own.name] = a + b if isinstance(a, tuple) else {**a, **b}
        return Rules(**joined)

    def inside(self, module: str, theirs: str | None = None) -> "Rules":
        """The same rules one level down, in a module of ours ("": in none) and in one of theirs.

        Args:
          module: ours.
          theirs: theirs; None is of the same name.
        """
        theirs = module if theirs is None else theirs
        own = f"{module}." if module else ""

        def there(name: str | Shape) -> Any:
            return f"{theirs}.{name}" if isinstance(name, str) else name

        return Rules(
            under(module, theirs, self.names),
            {there(name): there(other) for name, other in self.aliases.items()},
            {rf"{theirs}\.{pattern}": make for pattern, make in self.constants.items()},
            tuple(rf"{theirs}\.{pattern}" for pattern in self.unused),
            {there(name): there(like) for name, like in self.beside.items()},
            tuple(f"{own}{path}" for path in self.rows),
            tuple(f"{own}{path}" for path in self.flat),
            tuple(f"{own}{path}" for path in self.pointwise),
            tuple(rf"{re.escape(own)}{pattern}" for pattern in self.untransposed),
        )

    def tensor_of(self, path: str) -> Part:
        """The tensor of one of our parameters, and which part of it."""
        module, _, leaf = path.rpartition(".")
        layer = re.search(r"\.(\d+)\.", path)
        number = layer.group(1) if layer else ""
        for key, suffix in ((path, ""), (module, f".{_LEAVES.get(leaf, leaf)}")):
            tensor = self.names.get(re.sub(r"\.\d+\.", ".{}.", key, count=1))
            if tensor is not None:
                part = tensor if isinstance(tensor, Part) else Part(tensor, 0, 1)
                return Part(part.module.format(number) + suffix, part.index, part.count)
        raise CheckpointError(f"this family's checkpoints have no tensor for {path}.")

    def to_tensor(self, path: str, param: np.ndarray, axes: tuple) -> np.ndarray:
        """A parameter as their tensor (or its part)."""
        leaf = path.rpartition(".")[2]
        if leaf == "kernel" and axes[0] is None:  # a convolution, [width, in, out]
            return param.transpose(2, 1, 0)
        if leaf == "kernel":
            matrix = param.reshape(math.prod(param.shape[: input_axes(axes)]), -1)
            matrix = matrix.T if self._transposed(path) else matrix
            if _is_of_patches(axes):  # theirs is a convolution, [out, in, height, width]
                return matrix.reshape(-1, *param.shape[:-1])
            return matrix[..., None, None] if path in self.pointwise else matrix
        if path in self.rows:
            return param[None]
        return param.reshape(-1) if leaf == "bias" or path in self.flat else param

    def to_param(self, path: str, tensor: np.ndarray, shape: Shape, axes: tuple) -> np.ndarray:
        """The inverse of ``to_tensor``."""
        leaf = path.rpartition(".")[2]
        if leaf == "kernel" and axes[0] is None:
            return tensor.transpose(2, 1, 0)
        if leaf == "kernel" and self._transposed(path):
            tensor = np.moveaxis(tensor, 0, -1) if _is_of_patches(axes) else tensor.T
        return tensor.reshape(shape)

    def whole(self, path: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        """A tensor of its parts, in order; ``path`` is that of any of them."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self.side_by_side(path))

    def part(self, path: str, tensor: np.ndarray, part: Part) -> np.ndarray:
        """One part of a whole tensor, that of a parameter."""
        if part.count == 1:
            return tensor
        return np.split(tensor, part.count, axis=self.side_by_side(path))[part.index]

    def side_by_side(self, path: str) -> int:
        """The axis of outputs, along which the parts of a parameter's tensor lie."""
        return 0 if self._transposed(path) else -1

    def _transposed(self, path: str) -> bool:
        return not any(re.fullmatch(pattern, path) for pattern in self.untransposed)

    def standing_in(self, names: Mapping[str, str]) -> dict[str, str]:
        """The same names, but where a file has only a repetition of a tensor: that is the tensor."""
        tensors = dict(names)
        for name, known in sorted(names.items()):
            if known in self.aliases and self.aliases[known] not in tensors.values():
                tensors[name] = self.aliases[known]
        return tensors

    def constant(self, name: str) -> Constant | None:
        """The values that a tensor of this name must hold, if the model computes it."""
        matches = (make for key, make in self.constants.items() if re.fullmatch(key, name))
        return next(matches, None)

    def is_unused(self, name: str) -> bool:
        """Whether nothing computes with a tensor of this name."""
        return any(re.fullmatch(pattern, name) for pattern in self.unused)


def _is_of_patches(axes: tuple) -> bool:
    """Whether a kernel is that of patches, [in, height, width, out]."""
    return len(axes) == 4 and axes[0] == "channels"


def input_axes(axes: tuple) -> int:
    """How many leading axes of a kernel its inputs are summed over; the others are its outputs."""
    return 1 if axes[0] == "embed" else len(axes) - 1


def canonical(names: set[str], prefix: str, old_names: Mapping[str, str]) -> dict[str, str]:
    """A file's names -> those of the rules.

    Args:
      names: in the file.
      prefix: what the rules' names begin with, except where a model was saved without its head.
      old_names: pattern -> replacement, for names of older files.
    """
    bare = prefix and not any(name.startswith(prefix) for name in names)
    tensors = {}
    for name in names:
        new = f"{prefix}{name}" if bare else name
        for pattern, replacement in old_names.items():
            new = re.sub(pattern, replacement, new)
        tensors[name] = new
    return tensors


def under(ours: str, theirs: str, names: Mapping[str, str | Part]) -> dict[str, str | Part]:
    """The same rules one level down: inside our module ("" is none) and theirs."""
    own = f"{ours}." if ours else ""

    def inside(value: str | Part) -> str | Part:
        if isinstance(value, Part):
            return Part(f"{theirs}.{value.module}", value.index, value.count)
        return f"{theirs}.{value}"

    return {f"{own}{key}": inside(value) for key, value in names.items()}


def tensor_shapes(
    rules: Rules, shapes: Mapping[str, jax.ShapeDtypeStruct], axes: Mapping[str, tuple]
) -> dict[str, Shape]:
    """The shape of every tensor that parameters of these shapes make."""
    shapes_by_name: dict[str, Shape] = {}
    for path, param in shapes.items():
        part = rules.tensor_of(path)
        nothing = np.broadcast_to(np.uint8(0), param.shape)  # takes no memory
        shape = list(rules.to_tensor(path, nothing, axes[path]).shape)
        if part.count > 1:
            shape[rules.side_by_side(path)] *= part.count
        shapes_by_name[part.module] = tuple(shape)
    return shapes_by_name
