"""The suite on any function from pytest's command line, and the smallest case that breaks a promise."""

import os
import re
import subprocess
import sys

import pytest

ATTENTIONS = """
import jax
import jax.numpy as jnp

import crossattn as xa
from crossattn.ops.masks import Mask, causal


def right(q, k, v, mask=None, bias=None):
    return xa.attend(q, k, v, mask, bias=bias, backend="reference")


def mean_of_nothing(q, k, v, mask=None):
    empty = ~jnp.broadcast_to(mask, (*q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])).any(-1)
    mean = jnp.repeat(v, q.shape[-2] // v.shape[-2], -2).mean(-3, keepdims=True)
    return jnp.where(jnp.swapaxes(empty, -1, -2)[..., None], mean, right(q, k, v, mask))


def leaks_nan(q, k, v, mask=None):
    return right(q, k, v, mask) + 0 * v.sum()


def sees_the_future(q, k, v, mask=None):
    if isinstance(mask, Mask):
        mask = mask | causal(offset=1)
    return right(q, k, v, mask)
"""


def suite(folder, name, *options):
    """Returns the output of pytest and its exit code."""
    (folder / "attentions.py").write_text(ATTENTIONS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}",
         f"--attention=attentions:{name}", *options],
        cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )  # fmt: skip
    return done.stdout + done.stderr, done.returncode


@pytest.mark.slow
def test_a_function_that_keeps_its_promises_passes_and_refusals_are_skipped(tmp_path):
    said, code = suite(tmp_path, "right", "--attention-quick", "-k", "positions or scale")
    assert code == 0, said
    assert re.search(r"2 passed, 1 skipped", said), said


@pytest.mark.slow  # test_conformance finds faults in this process
@pytest.mark.parametrize(
    ("name", "case", "smallest", "fault"),
    [
        (
            "mean_of_nothing",
            "some_rows_read_nothing",
            "S=1",
            "of a query that reads nothing is not 0",
        ),
        ("leaks_nan", "nan_in_future_v", "S=2", "NaN"),
        ("sees_the_future", "causal", "S=2", "1 of 1 differ"),
    ],
)
def test_a_broken_promise_says_the_smallest_case(tmp_path, name, case, smallest, fault):
    said, code = suite(tmp_path, name, "-k", f"[{case}] and not gradients")
    assert code == 1, said
    assert f"smallest case: B=1 T=1 {smallest} N=1 K=1 H=1 Hv=1" in said, said
    assert fault in said.split("there: ")[1], said


@pytest.mark.slow
def test_a_name_that_is_not_there_is_one_sentence(tmp_path):
    said, code = suite(tmp_path, "absent")
    assert code == 4
    assert "--attention=attentions:absent cannot be imported" in said
