"""Type checks of annotations, made once for each function that is written, not each that is made.

jaxtyping's own decorator makes its checks, which takes milliseconds, anew of a function within a function
whenever the outer one is called, and binds the arguments of each call by their signature: of a model that is
traced, all this takes longer than the trace. Here a check depends on the signature alone, so functions that
agree in theirs share it, and what says nothing of its arguments and results is left as it is. A check is made
at the first call, when every name that an annotation has is there.
"""

import contextlib
import functools
import inspect
import typing

import jaxtyping
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation

_jaxtyped = jaxtyping.jaxtyped
_CHECKS = {}


def jaxtyped(*, typechecker):
    """Returns the decorator that jaxtyping's hook applies to each function and class of a package."""
    own = _jaxtyped(typechecker=typechecker)
    return lambda made: own(made) if inspect.isclass(made) else checked(made)


def checked(function):
    """Applies beartype to a function's arguments, then to its result, whose axes are those of one call."""
    if not function.__annotations__:
        return function
    checks = None

    @functools.wraps(function)
    def held(*args, **kwargs):
        nonlocal checks
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        checks = checks or _checks(function)
        arguments, result, context = checks
        with context("context"):
            if arguments is not None:
                _hold("parameters", function, arguments, *args, **kwargs)
            out = function(*args, **kwargs)
            if result is not None:
                _hold("return value", function, result, out)
        return out

    return held


def _hold(what, function, check, *args, **kwargs):
    __tracebackhide__ = True
    try:
        check(*args, **kwargs)
    except BeartypeCallHintViolation as violation:
        name = f"{function.__module__}.{function.__qualname__}"
        raise jaxtyping.TypeCheckError(f"the {what} of {name}: {violation}") from None


def _checks(function):
    """Returns what checks a function's arguments and its result, None where nothing is said, and the axes."""
    said = function.__annotations__
    key = function.__module__, function.__code__, tuple(map(_content, said.items()))
    try:
        known = key in _CHECKS
    except TypeError:  # An annotation that has no hash.
        return _made(function, said)
    if not known:
        _CHECKS[key] = _made(function, said)
    return _CHECKS[key]


def _made(function, said):
    said = {name: _meant(hint, function.__globals__) for name, hint in said.items()}
    said = {name: hint for name, hint in said.items() if hint is not typing.Any}
    result = {"out": said.pop("return")} if "return" in said else {}
    given = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in inspect.signature(function).parameters.values()
    ]
    axes = any(map(_has_axes, (*said.values(), *result.values())))
    context = _jaxtyped if axes else contextlib.nullcontext
    return _check(str(inspect.Signature(given)), said), _check("(out)", result), context


def _check(parameters, said):
    if not said:
        return None
    scope = {}
    exec(f"def check{parameters}: pass", scope)
    scope["check"].__annotations__ = said
    return beartype(scope["check"])


def _has_axes(hint):
    return hasattr(hint, "dim_str") or any(map(_has_axes, typing.get_args(hint)))


def _meant(hint, names):
    """Returns an annotation with what its strings name; Any of a package that type checkers alone import."""
    holder = type("holder", (), {"__annotations__": {"x": hint}})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["x"]
    except NameError:
        return typing.Any


def _content(annotation):
    """Returns the content of an annotation; an array's is a new class each time that it is evaluated."""
    if isinstance(annotation, list | tuple):
        return tuple(map(_content, annotation))
    if hasattr(annotation, "dim_str"):
        return annotation.dtype, _content(annotation.array_type), annotation.dim_str
    if arguments := typing.get_args(annotation):
        return typing.get_origin(annotation), _content(arguments)
    return type(annotation), annotation  # For 1 == True.
