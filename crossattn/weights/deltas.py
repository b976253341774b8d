"""Deltas: what fine-tuning changed of a model's parameters, as one safetensors file, and several at once.

A delta has each parameter of which a bit changed, whole and under its path here, and the SHA-256 of the
parameters that it began from. So base and delta together are the fine-tuned parameters to the bit.

    params [changed]  ─► write ─► mine.safetensors ─► read ─► applied to its base ─► params
    deltas 0 .. N-1   ─► stack ─► changed [N ...] ─► row b takes changed[which[b]] ─► one program for all rows

``xa.save(file, model, params, delta_of=base)`` and ``xa.load(file, base=...)`` call these. A parameter that
differs in one number is stored whole.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossattn import functional
from crossattn.types import AnyArray, Array, Int, Params
from crossattn.weights.formats import safetensors
from crossattn.weights.formats.safetensors import CheckpointError

_FORMAT = "crossattn delta"


@dataclass(frozen=True)
class Delta:
    """The parameters that differ from those of a base.

    Attributes:
      base: ``checksum`` of the base.
      changed: paths of parameters -> their values.
      source: the name of the delta in messages.
    """

    base: str
    changed: Mapping[str, AnyArray]
    source: str = "the delta"

    def applied(self, params: Params) -> Params:
        """Returns the base's parameters with the changed ones in their places, on their devices.

        Raises:
          CheckpointError: these are the parameters of another base.
        """
        flat = _flat(params)
        self.check(checksum(params), flat)
        new = {name: _placed(x, flat[name]) for name, x in self.changed.items()}
        return functional.nest(flat | new)

    def check(self, base: str, names: Mapping[str, Any]) -> None:
        """Checks that this is a delta of the base with this checksum and these parameters.

        Raises:
          CheckpointError: it is of another, or changes a parameter that the base lacks.
        """
        if base != self.base:
            raise CheckpointError(
                f"{self.source} is a delta of parameters with SHA-256 {self.base[:12]}..., and these have"
                f" {base[:12]}...; give the base that it was saved with."
            )
        if unknown := sorted(self.changed.keys() - names.keys()):
            raise CheckpointError(
                f"{self.source} changes {', '.join(unknown)}, which its base has not; save it again."
            )


def checksum(params: Params) -> str:
    """Computes the SHA-256 of parameters: paths, types, shapes and bits.

    Raises:
      CheckpointError: they are quantised.
    """
    total = hashlib.sha256()
    for name, param in sorted(_flat(params).items()):
        array = np.ascontiguousarray(param)
        total.update(f"{name} {array.dtype} {array.shape}\n".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def difference(params: Params, base: Params) -> Delta:
    """Returns the delta that makes ``params`` of a base.

    Raises:
      CheckpointError: the two have parameters of other names, or quantised ones.
    """
    new, old = _flat(params), _flat(base)
    if other := sorted(new.keys() ^ old.keys()):
        raise CheckpointError(
            f"params and delta_of have not the same parameters: {', '.join(other[:3])} only one of them has;"
            " give the base that params began from."
        )
    changed = {name: x for name, x in new.items() if not _same(x, old[name])}
    return Delta(checksum(base), changed)


def write(file: str | Path, params: Params, base: Params) -> Path:
    """Writes the delta of parameters to a base as a safetensors file; returns its path.

    Raises:
      CheckpointError: as ``difference`` does, or the file's name ends otherwise.
    """
    path = Path(file)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"a delta is one file; expected a name that ends in .safetensors, not {path}."
        )
    delta = difference(params, base)
    told = {"format": _FORMAT, "base_sha256": delta.base}
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(x) for name, x in delta.changed.items()}
    safetensors.write(path, arrays, json.dumps({"__metadata__": told}).encode())
    return path


def read(file: str | Path) -> Delta:
    """Reads the delta in a file.

    Raises:
      CheckpointError: there is no such file, it is damaged, or it is no delta.
    """
    files = safetensors.open_file(Path(file))
    told = files.metadata
    if told.get("format") != _FORMAT or "base_sha256" not in told:
        raise CheckpointError(
            f"{file} is no delta; expected a file that xa.save(..., delta_of=base) wrote."
        )
    return Delta(told["base_sha256"], dict(files.read(set(files.shapes))), str(file))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["shared", "changed"], meta_fields=["count"]
)
@dataclass(frozen=True)
class Deltas:
    """Several deltas of one base, for rows of a batch that each choose one; a pytree, see ``stack``.

    Attributes:
      shared: the base's parameters that no delta changes, by their paths.
      changed: the others, [count ...]: the base's values where a delta leaves them.
      count: the number of deltas.
    """

    shared: Mapping[str, Array]
    changed: Mapping[str, Array]
    count: int

    def params(self, which: Int[AnyArray, ""] | int) -> Params:
        """Returns the parameters of one delta; all changed ones are NaN where there is no such number."""
        own = {name: _taken(x, which) for name, x in self.changed.items()}
        return functional.nest({**self.shared, **own})

    def rows(self, function: Callable[..., Any], which: Int[AnyArray, " B"], *batch: Any) -> Any:
        """Calls a function on each row of a batch, with the parameters of the row's delta, as one program.

        ``several.rows(lambda params, x: xa.apply(model, params, x), which, source)``. A product with shared
        parameters is one of all rows; one with changed parameters reads a copy of them for each row.

        Args:
          function: takes parameters and the arrays of one row [1 ...]; returns arrays [1 ...].
          which: the number of each row's delta, from 0.
          batch: arrays [B ...], or nested ones, or None.

        Raises:
          ValueError: there is no delta of a number; under ``jax.jit``, where numbers are not known, the
            outputs of its row are NaN.
        """
        if not isinstance(which, jax.core.Tracer):
            self._refuse(np.asarray(which))

        def one(number: Any, *row: Any) -> Any:
            outputs = function(self.params(number), *jax.tree.map(lambda x: x[None], row))
            return jax.tree.map(lambda x: jnp.squeeze(x, 0), outputs)

        return jax.vmap(one)(jnp.asarray(which), *batch)

    def _refuse(self, which: np.ndarray) -> None:
        if wrong := sorted({int(x) for x in which if not 0 <= x < self.count}):
            raise ValueError(f"which has {wrong[0]}; expected 0 to {self.count - 1}.")


def stack(base: Params, deltas: Sequence[Delta]) -> Deltas:
    """Returns deltas of one base side by side in memory; ``difference(base, base)`` is the base itself.

    Raises:
      CheckpointError: a delta is of another base, or has a parameter of another shape.
      ValueError: there are none.
    """
    if not deltas:
        raise ValueError("deltas is empty; expected one or more.")
    flat, own = _flat(base), checksum(base)
    for delta in deltas:
        delta.check(own, flat)
        for name, x in delta.changed.items():
            if (x.shape, x.dtype) != (flat[name].shape, flat[name].dtype):
                raise CheckpointError(
                    f"{delta.source} has {name} as {x.dtype} {list(x.shape)}, its base as"
                    f" {flat[name].dtype} {list(flat[name].shape)}; such a delta is applied alone."
                )
    names = {name for delta in deltas for name in delta.changed}
    changed = {
        name: jnp.stack([jnp.asarray(delta.changed.get(name, flat[name])) for delta in deltas])
        for name in sorted(names)
    }
    return Deltas({k: x for k, x in flat.items() if k not in names}, changed, len(deltas))


def share(delta: Delta, params: Params) -> float:
    """Returns the share of numbers of ``params`` that the delta stores."""
    return sum(int(x.size) for x in delta.changed.values()) / functional.count(params)


def _flat(params: Params) -> dict[str, Any]:
    flat = functional.flatten(params)
    if any(map(functional.is_quantized, flat.values())):
        raise CheckpointError("params are quantised, and deltas are not; give unquantised ones.")
    return flat


def _same(new: Any, old: Any) -> bool:
    """Returns whether two parameters have the same bits."""
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        return False
    return np.asarray(new).tobytes() == np.asarray(old).tobytes()


def _placed(value: AnyArray, like: Any) -> Any:
    same = isinstance(like, jax.Array) and like.shape == value.shape
    return jax.device_put(value, like.sharding if same else None)


def _taken(stacked: Array, which: Any) -> Array:
    return stacked.at[which].get(mode="fill", wrap_negative_indices=False)
