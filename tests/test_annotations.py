"""Annotations are checked of every function, also of one that is made again and again."""

import jaxtyping
import numpy as np
import pytest
from jaxtyping import Float

import crossattn as xa
from tests import annotations

checked = annotations.checked


def made(annotation):
    @checked
    def inner(x: annotation, y: int = 0) -> annotation:
        return x if y == 0 else None

    return inner


@pytest.mark.parametrize("time", ["first", "again"])
def test_a_function_within_a_function_is_checked_each_time_it_is_made(time):
    inner = made(Float[np.ndarray, "n n"])
    assert inner(np.ones((2, 2))).shape == (2, 2)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameters of .*inner"):
        inner(np.ones((2, 3)))
    with pytest.raises(jaxtyping.TypeCheckError, match="return value of .*inner"):
        inner(np.ones((2, 2)), 1)


def test_another_annotation_is_another_check():
    made(int)(1)
    made(bool)(True)
    with pytest.raises(jaxtyping.TypeCheckError):
        made(bool)(1)
    with pytest.raises(jaxtyping.TypeCheckError):
        made(Float[np.ndarray, " n"])(np.ones((2, 2)))


def test_an_axis_named_without_is_the_same_within():
    @checked
    def outer(x: Float[np.ndarray, " n"], size: int):
        return made(Float[np.ndarray, " n"])(np.ones(size))

    assert outer(np.ones(3), 4).shape == (4,)  # A function's axes are its own.


def test_checks_are_made_once(monkeypatch):
    count = []
    monkeypatch.setattr(annotations, "beartype", lambda f: count.append(f) or f)
    for _ in range(3):
        made(Float[np.ndarray, "once only"])(np.ones((2, 2)))
    assert len(count) == 2  # One of the parameters, one of what is returned.


def test_functions_of_the_library_are_checked_and_those_that_say_nothing_are_left_alone():
    q, k, v = (np.ones(shape, np.float32) for shape in ((1, 2, 1, 4), (1, 3, 1, 4), (1, 4, 1, 4)))
    with pytest.raises(jaxtyping.TypeCheckError, match="the parameters of crossattn.ops"):
        xa.attend(q, k, v)
    lengths = xa.masks.lengths(np.array([1]))
    with pytest.raises(jaxtyping.TypeCheckError, match="the parameters of crossattn.ops.masks"):
        lengths & "a name that is defined after its methods"
    plain = lambda x: x  # noqa: E731
    assert checked(plain) is plain
