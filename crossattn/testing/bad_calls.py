"""Calls that must raise ValueError, each with the words that its message must have."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from crossattn.ops import masks as mask_algebra
from crossattn.testing.checks import Broken

m: Any = mask_algebra  # the terms take numpy arrays too, which its types do not say

GOOD = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8)}
WEIGHTS = (2, 4, 5, 7)


class BadCall(NamedTuple):
    """Good arguments with some replaced, and what the message must name: argument, given, expected."""

    name: str
    words: tuple[str, ...]
    arguments: dict

    def __str__(self):
        return self.name


def check_bad_call(attend, call: BadCall) -> None:
    """Checks that a call raises ValueError with every word.

    Raises:
      Broken: there was an answer.
      OtherError: there was another error, or one whose message leaves something out.
    """
    arguments = {**{name: jnp.zeros(shape) for name, shape in GOOD.items()}, **call.arguments}
    try:
        attend(**arguments)
    except ValueError as error:
        said = str(error)
        missing = [word for word in call.words if word not in said]
        if missing:
            raise OtherError(f"the message lacks {', '.join(missing)}: {said}") from error
        if len(said) > 400:
            raise OtherError(
                f"{len(said)} characters are not one clear sentence: {said}"
            ) from error
    except NotImplementedError:
        raise
    except Exception as error:
        if lacks_argument(error):
            raise
        raise OtherError(f"{type(error).__name__}, not ValueError: {error}") from error
    else:
        raise Broken("it was answered")


class OtherError(Exception):
    """Error of a bad call that is of another type or says less than it should."""


def lacks_argument(error: Exception) -> bool:
    """Returns whether a callable's signature lacks a keyword argument that it was given."""
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error)


def bad_calls():
    """Yields every bad call."""
    for call in (*_operands(), *_masks_and_biases(), *_options()):
        yield BadCall(*call)


def _operands():
    zeros = jnp.zeros
    for name in "qkv":
        for shape in ((8,), (7, 8)):
            words = (name, *map(str, shape))
            yield f"{name}_of_{len(shape)}_axes", words, {name: zeros(shape)}
        for dtype in ("int32", "bool", "complex64"):
            yield f"{name}_of_{dtype}", (name, dtype, "float"), {name: zeros(GOOD[name], dtype)}
        yield f"{name}_a_list", (name, "list"), {name: [[[1.0]]]}
    for name in "kv":
        batch, *rest = GOOD[name]
        yield f"{name}_of_another_batch", (name, "3", "2"), {name: zeros((3, *rest))}
        yield f"{name}_without_batch", (name,), {name: zeros(rest)}
        yield f"{name}_with_a_second_batch_axis", (name,), {name: zeros((1, batch, *rest))}
    yield "k_of_another_head_size", ("k", "8", "9"), {"k": zeros((2, 7, 2, 9))}
    yield "v_of_another_length", ("v", "6", "7"), {"v": zeros((2, 6, 2, 8))}
    yield "v_of_other_heads", ("v", "heads", "1", "2"), {"v": zeros((2, 7, 1, 8))}
    for heads in (3, 8):
        arrays = {"k": zeros((2, 7, heads, 8)), "v": zeros((2, 7, heads, 8))}
        yield f"4_query_heads_for_{heads}_key_heads", ("heads", "4", str(heads)), arrays
    empty = {"q": zeros((2, 5, 4, 0)), "k": zeros((2, 7, 2, 0))}
    yield "head_size_0", ("q", "head size", "0"), empty


def _masks_and_biases():
    shapes = [(7,), (5, 7), (2, 5, 7), (1, *WEIGHTS), (2, 4, 5, 6), (2, 4, 7, 5), (2, 2, 5, 7)]
    for shape in [*shapes, (3, 1, 1, 7)]:
        words, name = (*map(str, shape), *map(str, WEIGHTS)), "x".join(map(str, shape))
        yield f"mask_of_{name}", ("mask", *words), {"mask": jnp.zeros(shape, bool)}
        yield f"bias_of_{name}", ("bias", *words), {"bias": jnp.zeros(shape)}
    for dtype in ("float32", "int32"):
        array = jnp.zeros((2, 1, 1, 7), dtype)
        yield f"mask_of_{dtype}", ("mask", dtype, "bool"), {"mask": array}
    for dtype in ("bool", "int32"):
        yield f"bias_of_{dtype}", ("bias", dtype, "float"), {"bias": jnp.zeros(WEIGHTS, dtype)}
    yield "mask_a_list", ("mask", "list", "bool"), {"mask": [[True]]}
    other_keys, other_batch = np.ones((2, 6), bool), np.ones((3, 7), bool)
    yield "term_of_another_length", ("mask", "6", "7"), {"mask": m.key_padding(other_keys)}
    yield "term_of_another_batch", ("mask", "3", "2"), {"mask": m.key_padding(other_batch)}


def _options():
    for name in ("scale", "softcap"):
        yield f"{name}_an_array", (name, "(4,)"), {name: jnp.ones(4)}
        yield f"{name}_a_word", (name, "large"), {name: "large"}
    yield "softcap_0", ("softcap", "0"), {"softcap": 0.0}
    yield "softcap_negative", ("softcap", "-1"), {"softcap": -1.0}
    yield "dropout_without_a_key", ("dropout_key", "0.1"), {"dropout_rate": 0.1}
    for rate in (-0.1, 1.5):
        arguments = {"dropout_rate": rate, "dropout_key": jax.random.key(0)}
        yield f"dropout_rate_{rate}", ("dropout_rate", str(rate)), arguments
    yield "dropout_rate_a_word", ("dropout_rate", "high", "number"), {"dropout_rate": "high"}
    number = {"dropout_rate": 0.1, "dropout_key": 0}
    yield "dropout_key_a_number", ("dropout_key", "jax.random.key"), number
    yield "backend_unknown", ("backend", "fastest", "expected"), {"backend": "fastest"}
