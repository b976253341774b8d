"""The conformance suite finds what is wrong, and only that, in attention written by others."""

import collections
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import crossattn as xa
from crossattn import testing


def textbook(q, k, v, mask=None):
    """Attention as one writes it first: no options, masked logits of -1e9, one key head a query head."""
    if k.shape[-2] != q.shape[-2]:
        raise NotImplementedError("one key head for each query head")
    logits = jnp.einsum("...tnh,...snh->...nts", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        logits = jnp.where(mask, logits, -1e9)
    return jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(logits), v)


def grouped(q, k, v, mask=None):
    """Computes the same for grouped heads."""
    k, v = (jnp.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    return textbook(q, k, v, mask)


def item(promise, case):
    """The one check of a promise on a case."""
    return next(x for x in testing.items(promises=[promise]) if x.case == case)


def outcomes(attend, *promises, **options):
    """Returns counts of outcomes, and the outcome of each case."""
    found = testing.conformance(attend, promises=promises, **options)
    counts = collections.Counter(finding.outcome.split(":")[0] for finding in found)
    return counts, {finding.case: finding.outcome for finding in found}


@pytest.mark.usefixtures("in_production")
def test_attend_keeps_every_promise_in_the_quick_suite():
    found = testing.conformance(xa.attend, quick=True, promises=["positions", "errors"])
    assert {finding.outcome for finding in found} == {"kept"}
    assert {finding.promise for finding in found} == {"positions", "errors"}


def test_quick_has_a_case_of_each_promise():
    found = dict.fromkeys(item.promise for item in testing.items(quick=True))
    assert [*found] == [*testing.PROMISES]


@pytest.mark.slow
def test_textbook_attention_breaks_what_it_does_not_keep_and_keeps_the_rest():
    attend = testing.with_arrays(grouped)
    _, said = outcomes(attend, "nothing to read", "masked is not there")
    nothing = "broken: the output of a query that reads nothing"
    assert said["some_rows_read_nothing"].startswith(nothing)
    assert said["additive_minus_infinity_everywhere"].startswith("refused: ")
    assert "bias" in said["additive_minus_infinity_everywhere"]
    assert said["nan_in_padding"].startswith("broken: output: ")
    assert "NaN" in said["nan_in_padding"]
    for promise, case in {"positions": "causal", "composition": "vmap_over_examples"}.items():
        item(promise, case).check(attend)
    _, said = outcomes(testing.with_arrays(textbook), "positions", quick=True)
    assert said["causal"] == "refused: one key head for each query head"


def test_other_exceptions_are_faults_unless_said_to_be_refusals():
    def attend(q, k, v, mask=None):
        raise ValueError("not today")

    assert outcomes(attend, "positions", quick=True)[1]["causal"] == "broken: ValueError: not today"
    _, said = outcomes(attend, "positions", quick=True, refusals=(ValueError,))
    assert said["causal"] == "refused: not today"


def scaled_extra(found):
    return found[0], found[1] * 1.01


@pytest.mark.parametrize(
    ("promise", "case", "spoil", "said"),
    [
        ("shapes", "no_mask_at_all", lambda out: out + 1e-3, "output: "),
        ("shapes", "one_query", lambda out: out[..., None], "output: shape"),
        ("float32 inside", "bfloat16", lambda out: out.astype(float), "the output is float32"),
        ("masked is not there", "nan_in_future_v", jnp.nan_to_num, "a NaN that may be read is"),
        ("gradients", "causal", jax.lax.stop_gradient, "gradient of k: "),
        ("composition", "gradients_of_vmap", lambda out: 1.01 * out, "gradient of q: "),
        ("composition", "sharded_arrays", lambda out: 1.01 * out, "output: "),
        ("weights", "causal", scaled_extra, "weights: "),
        ("weights", "causal", lambda found: (found[0], None), "weights are None"),
        ("log-sum-exp", "causal", scaled_extra, "log-sum-exp: "),
    ],
)
def test_a_fault_is_found(promise, case, spoil, said):
    def attend(*arguments, **options):
        return spoil(xa.attend(*arguments, **options))

    with pytest.raises(testing.Broken, match=f"^{said}"):
        item(promise, case).check(attend)


def test_a_bad_call_is_broken_by_an_answer_and_by_another_error():
    assert set(outcomes(lambda **options: 0.0, "errors", quick=True)[1].values()) == {
        "broken: it was answered"
    }

    def attend(q, k, v, mask=None):
        raise KeyError("no")

    _, said = outcomes(attend, "errors")
    assert said["mask_of_5x7"].startswith("worded otherwise: KeyError, not ValueError")
    assert said["backend_unknown"].startswith("refused: ")  # its signature has no backend


@pytest.mark.usefixtures("in_production")
def test_wording_is_told_apart_from_what_is_broken():
    def attend(*arguments, **options):
        try:
            return xa.attend(*arguments, **options)
        except ValueError:
            raise ValueError("no") from None

    counts, said = outcomes(attend, "errors", "positions", quick=True)
    assert set(counts) == {"worded otherwise", "kept"}
    assert said["mask_of_float32"] == "worded otherwise: the message lacks mask, float32, bool: no"
    found = testing.conformance(attend, promises=["errors"], quick=True)
    assert {finding.kind for finding in found} == {"worded otherwise"}


@pytest.mark.parametrize("refusals", [(NotImplementedError,), (Exception,)])
def test_a_callable_of_arrays_alone_is_told_of_with_arrays(refusals):
    counts, said = outcomes(grouped, "positions", "shapes", quick=True, refusals=refusals)
    assert set(counts) == {"refused", "kept"}
    assert "takes no Mask; give the suite testing.with_arrays(attend)" in said["causal"]
    assert said["no_mask_at_all"] == "kept"
    counts, _ = outcomes(testing.with_arrays(grouped), "positions", quick=True)
    assert set(counts) == {"kept"}


def test_who_fails_with_arrays_too_is_not_told_of_them():
    def attend(q, k, v, mask=None):
        raise TypeError("no masks of any kind")

    _, said = outcomes(attend, "positions", quick=True)
    assert said["causal"] == "broken: TypeError: no masks of any kind"


def test_an_unknown_promise_is_refused():
    with pytest.raises(ValueError, match=r"promises has \['speed'\]; expected some of float32"):
        testing.conformance(xa.attend, promises=["speed"])


PROGRAM = """
import sys
from crossattn import testing
import crossattn as xa
testing.conformance(xa.attend, promises=["composition"], quick=True)
print(sorted({name.split(".")[0] for name in sys.modules} & {"pytest", "flax", "optax", "torch"}))
"""


def test_it_needs_neither_pytest_nor_flax():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
