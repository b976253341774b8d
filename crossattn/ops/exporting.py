"""Pytrees of this package as arguments and results of functions that ``jax.export`` serialises."""

import dataclasses
import json
from typing import Any, TypeVar

import jax.export

_Class = TypeVar("_Class", bound=type)


def exportable(cls: _Class) -> _Class:
    """Registers a dataclass that is a pytree already; static fields are what JSON holds, lists as tuples."""
    fields = dataclasses.fields(cls)
    static = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]

    def from_children(aux_data: Any, children: Any) -> Any:
        # Not by the class itself: JAX's children are placeholders, and a class may check what it holds.
        made = object.__new__(cls)
        for name, value in (
            *zip(data, children, strict=True),
            *zip(static, aux_data, strict=True),
        ):
            object.__setattr__(made, name, tuple(value) if isinstance(value, list) else value)
        return made

    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"crossattn.{cls.__name__}",
        serialize_auxdata=lambda auxiliary: json.dumps(list(auxiliary or ())).encode(),
        deserialize_auxdata=lambda said: tuple(json.loads(said)),
        from_children=from_children,
    )
    return cls
