"""Rules that map our parameters to a checkpoint's tensors: names and layouts.

A rule pairs one of our modules with one of theirs, with ``{}`` for the number of the layer; the names of its
parameters give those of its tensors. Every parameter has exactly one tensor, and each tensor a rule.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Names:
    """The names of a checkpoint's tensors.

    Attributes:
      dtypes: name -> type ("F32", "BF16"); None without a checkpoint: there is whatever a config allows.
    """

    dtypes: Mapping[str, str] | None = None

    def __contains__(self, name: str) -> bool:
        return self.dtypes is None or name in self.dtypes

    def within(self, module: str) -> "Names":
        """Returns the names inside a module, relative to it."""
        if self.dtypes is None:
            return self
        start, own = f"{module}.", self.dtypes.items()
        return Names({name.removeprefix(start): x for name, x in own if name.startswith(start)})

    def has(self, module: str, kind: str, needs: Sequence[str], may: Sequence[str] = ()) -> bool:
        """Returns whether a model of the class ``kind`` ("" is unknown) has a module.

        The classes ``needs`` have it, and those in ``may`` have it unless a file lacks it.
        """
        if self.dtypes is None:
            return not kind or kind in (*needs, *may)
        return kind in needs or any(name.startswith(f"{module}.") for name in self.dtypes)


@dataclass(frozen=True)
class Rules:
    """The names and layouts of the tensors of one family of models.

    Attributes:
      names: our module -> theirs; or one of our parameters -> the full name of its tensor.
      aliases: their tensor -> the one that it repeats where a file has both.
      constants: pattern -> the values of tensors that the model computes itself.
      unused: patterns of tensors that nothing computes with; kept for saving.
      beside: unused and constant tensors that ``transformers`` expects in the file of a fresh model -> the
        tensor that they copy there, or the shape of a constant.
      rows: parameters [X] whose tensors are [1, X].
      flat: parameters [1, X] whose tensors are [X].
      pointwise: kernels whose tensors are convolutions of one pixel, [out, in, 1, 1].
      untransposed: patterns of kernels whose tensors are [in, out] like ours.
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
        """Joins the rules of two families that have no name in common."""
        joined: dict[str, Any] = {}
        for own in fields(self):
            a, b = getattr(self, own.name), getattr(other, own.name)
            joined[own.name] = a + b if isinstance(a, tuple) else {**a, **b}
        return Rules(**joined)

    def inside(self, module: str, theirs: str | None = None) -> "Rules":
        """Returns the rules of a model that has this one as ``module`` ("" is none), there ``theirs``."""
        theirs = module if theirs is None else theirs
        own = f"{module}." if module else ""

        def ours(paths: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(own + path for path in paths)

        def there(name: str | Shape) -> Any:
            return f"{theirs}.{name}" if isinstance(name, str) else name

        return Rules(
            under(module, theirs, self.names),
            {there(name): there(other) for name, other in self.aliases.items()},
            {rf"{theirs}\.{pattern}": make for pattern, make in self.constants.items()},
            tuple(rf"{theirs}\.{pattern}" for pattern in self.unused),
            {there(name): there(like) for name, like in self.beside.items()},
            ours(self.rows),
            ours(self.flat),
            ours(self.pointwise),
            tuple(re.escape(own) + pattern for pattern in self.untransposed),
        )

    def tensor_of(self, path: str) -> Part:
        """Returns the tensor of one of our parameters, or the part of one."""
        module, _, leaf = path.rpartition(".")
        layer = re.search(r"\.(\d+)\.", path)
        number = layer.group(1) if layer else ""
        for key, suffix in ((path, ""), (module, f".{_LEAVES.get(leaf, leaf)}")):
            tensor = self.names.get(re.sub(r"\.\d+\.", ".{}.", key, count=1))
            if tensor is not None:
                part = tensor if isinstance(tensor, Part) else Part(tensor)
                return replace(part, module=part.module.format(number) + suffix)
        raise CheckpointError(f"this family's checkpoints have no tensor for {path}.")

    def to_tensor(self, path: str, param: np.ndarray, axes: tuple) -> np.ndarray:
        """Returns a parameter in the layout of its tensor, or of its part of one."""
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
        """Returns the parameter that a whole tensor has in it."""
        part = self.tensor_of(path)
        if part.count > 1:
            tensor = np.split(tensor, part.count, self._part_axis(path))[part.index]
        leaf = path.rpartition(".")[2]
        if leaf == "kernel" and axes[0] is None:
            return tensor.transpose(2, 1, 0)
        if leaf == "kernel" and self._transposed(path):
            tensor = np.moveaxis(tensor, 0, -1) if _is_of_patches(axes) else tensor.T
        return tensor.reshape(shape)

    def joined(self, path: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor of these parts, in order; ``path`` is the parameter of any of them."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts, self._part_axis(path))

    def shapes(
        self, params: Mapping[str, jax.ShapeDtypeStruct], axes: Mapping[str, tuple]
    ) -> dict[str, Shape]:
        """Returns the shapes of the tensors of these parameters."""
        shapes: dict[str, Shape] = {}
        for path, param in params.items():
            part = self.tensor_of(path)
            nothing = np.broadcast_to(np.uint8(0), param.shape)  # takes no memory
            shape = list(self.to_tensor(path, nothing, axes[path]).shape)
            if part.count > 1:
                shape[self._part_axis(path)] *= part.count
            shapes[part.module] = tuple(shape)
        return shapes

    def _part_axis(self, path: str) -> int:
        """Returns the axis of outputs, which parts of a tensor divide."""
        return 0 if self._transposed(path) else -1

    def _transposed(self, path: str) -> bool:
        return not any(re.fullmatch(pattern, path) for pattern in self.untransposed)

    def standing_in(self, names: Mapping[str, str]) -> dict[str, str]:
        """Returns the names, with a tensor's own in place of an alias that a file has instead of it."""
        tensors = dict(names)
        for name, known in sorted(names.items()):
            if known in self.aliases and self.aliases[known] not in tensors.values():
                tensors[name] = self.aliases[known]
        return tensors

    def constant(self, name: str) -> Constant | None:
        """Returns the function that computes a tensor of this name, if the model does."""
        matches = (make for key, make in self.constants.items() if re.fullmatch(key, name))
        return next(matches, None)

    def is_unused(self, name: str) -> bool:
        """Returns whether nothing computes with a tensor of this name."""
        return any(re.fullmatch(pattern, name) for pattern in self.unused)


def _is_of_patches(axes: tuple) -> bool:
    """Returns whether a kernel is that of patches, [in, height, width, out]."""
    return len(axes) == 4 and axes[0] == "channels"


def input_axes(axes: tuple) -> int:
    """Returns the number of input axes of a kernel, which come first; the others are outputs."""
    return 1 if axes[0] == "embed" else len(axes) - 1


def canonical(names: set[str], prefix: str, old_names: Mapping[str, str]) -> dict[str, str]:
    """Returns names of a file -> names of the rules, whose prefix a model saved without its head lacks."""
    bare = prefix and not any(name.startswith(prefix) for name in names)
    tensors = {}
    for name in names:
        new = f"{prefix}{name}" if bare else name
        for pattern, replacement in old_names.items():
            new = re.sub(pattern, replacement, new)
        tensors[name] = new
    return tensors


def under(ours: str, theirs: str, names: Mapping[str, str | Part]) -> dict[str, str | Part]:
    """Returns the names inside our module ("" is none) and theirs."""
    own = f"{ours}." if ours else ""
    return {
        own + key: replace(value, module=f"{theirs}.{value.module}")
        if isinstance(value, Part)
        else f"{theirs}.{value}"
        for key, value in names.items()
    }
