"""Type checks of annotations, made once for each function that is written, not each that is made.

jaxtyping checks functions within functions too, anew whenever the outer one is called; making a
check takes milliseconds, longer than the little calls it checks. A check depends on the signature
alone, so functions that agree in theirs share it.
"""

import inspect
import typing

from beartype import beartype

_CHECKED = {}


def checked(function):
    """Applies beartype to a function of jaxtyping, which has no body of its own."""
    try:
        key = _key(function)
        hash(key)
    except (TypeError, ValueError):  # An annotation that has no hash.
        return beartype(function)
    if key not in _CHECKED:
        _CHECKED[key] = beartype(function)
    return _CHECKED[key]


def _key(function):
    """Returns the place of the function, and all that its check reads."""
    signature = inspect.signature(function)
    parameters = tuple(
        (p.name, p.kind, p.default is p.empty, _content(p.annotation))
        for p in signature.parameters.values()
    )
    returned = _content(signature.return_annotation)
    return function.__module__, function.__qualname__, parameters, returned


def _content(annotation):
    """Returns the content of an annotation; an array's is a new class each time that it is evaluated."""
    if isinstance(annotation, list | tuple):
        return tuple(map(_content, annotation))
    if hasattr(annotation, "dim_str"):
        return annotation.dtype, _content(annotation.array_type), annotation.dim_str
    if arguments := typing.get_args(annotation):
        return typing.get_origin(annotation), _content(arguments)
    return type(annotation), annotation  # For 1 == True.
