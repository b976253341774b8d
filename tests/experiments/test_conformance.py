"""The tables of promises: what they count, when they fail, and that others are called as they document."""

import importlib
import json

import numpy as np
import pytest

from crossattn import testing
from crossattn.testing import Finding, models
from experiments.bench import conformance, contestants, model_contestants
from tests.peers import peer

OTHERS, _ = contestants.installed()


def findings(*outcomes, promise="shapes"):
    return [Finding(promise, f"case_{i}", outcome) for i, outcome in enumerate(outcomes)]


def run(monkeypatch, ours, *arguments):
    """The exit code where our column has these findings and another library breaks a promise."""
    others = findings("broken: theirs")
    monkeypatch.setattr(conformance, "_ours", lambda: {"xa": lambda quick: ours})
    monkeypatch.setattr(conformance, "_asked", lambda name, call: lambda quick: others)
    monkeypatch.setattr(contestants, "installed", lambda: ({"jax.nn": None}, ["torch"]))
    return conformance.main([*arguments])


def test_a_cell_is_what_was_kept_of_what_was_taken_and_apart_what_was_refused():
    found = findings("kept", "refused: no", "broken: by 1", "kept", "refused: never")
    lines = conformance.table({"one": found}).splitlines()
    cells = {line[:20].strip(): line[20:].strip() for line in lines[1:-2]}
    assert cells.pop("shapes") == "2/3 +2"
    assert set(cells.values()) == {"-"}
    assert {*cells, "shapes"} == {*testing.PROMISES}


def test_our_faults_fail_and_errors_worded_otherwise_are_apart(monkeypatch, capsys):
    worded = findings("kept", "worded otherwise: the message lacks mask: no", promise="errors")
    cells = [line.split() for line in conformance.table({"one": worded}).splitlines()]
    assert ["errors", "1/1", "~1"] in cells
    assert run(monkeypatch, findings("kept", "broken: by 1")) == 1
    assert "  xa, shapes, case_1: by 1" in capsys.readouterr().out
    assert run(monkeypatch, worded) == 1
    said = capsys.readouterr().out
    assert "broken, ours: none" in said
    assert "worded otherwise, ours:\n  xa, errors, case_1: the message lacks mask: no" in said


def test_a_fault_of_another_library_is_only_counted(monkeypatch, capsys, tmp_path):
    file = tmp_path / "outcomes.json"
    assert run(monkeypatch, findings("kept"), f"--json={file}") == 0
    said = capsys.readouterr().out
    assert "broken, ours: none" in said
    assert "not installed: torch" in said
    expected = {"promise": "shapes", "case": "case_0", "outcome": "broken: theirs"}
    assert json.loads(file.read_text())["jax.nn"] == [expected]


def test_an_unknown_column_is_one_line_and_exit_code_2(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, [], "--only=xb")
    assert stop.value.code == 2
    assert "--only=xb; expected some of xa, jax.nn" in capsys.readouterr().err


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("case", ["causal", "bias_and_mask", "some_rows_read_nothing"])
def test_what_another_library_is_given_is_what_it_documents(name, case):
    """Where it breaks a promise, it is in the rows that read nothing and nowhere else."""
    call = testing.with_arrays(OTHERS[name])
    if case == "some_rows_read_nothing":
        try:
            testing.check_output(call, testing.cases()[case])
        except testing.Broken as broken:
            assert "a query that reads nothing" in str(broken)
    else:
        testing.check_gradients(call, testing.cases()[case])


@pytest.mark.parametrize("name", sorted({"flax.nnx", "flax.linen"} & OTHERS.keys()))
def test_weights_of_flax_are_those_of_the_oracle(name):
    testing.check_weights(testing.with_arrays(OTHERS[name]), testing.cases()["causal"])


def running_sum(leak):
    """A language model of sums of the tokens so far; or of all."""
    table = np.random.default_rng(0).normal(size=(64, 8))

    def call(target):
        x = table[target]
        return np.cumsum(x, axis=1) + leak * x.sum(1, keepdims=True)

    return models.Model(call, models.texts(target=(6, 64)))


def test_a_model_of_ours_that_leaks_fails_and_its_row_says_what_was_asked(monkeypatch, capsys):
    monkeypatch.setattr(model_contestants, "others", lambda: ({}, ["torch"]))
    for leak, code, cell in ((0, 0, "1/1"), (1, 1, "0/1")):
        monkeypatch.setattr(model_contestants, "ours", lambda: {"sum": lambda: running_sum(leak)})  # noqa: B023
        assert conformance.main(["--models"]) == code
        said = capsys.readouterr().out
        names, row = (line for line in said.splitlines() if line.startswith(("   ", "sum ")))
        # same again, reads, leakage; padding, steps and packed texts are not offered
        assert row.split() == ["sum", "1/1", "1/1", cell, "-4", "1/1", "-4", "-2"]
        assert "no leakage" in names and "not installed: torch" in said
    assert "  sum, no leakage, each token: output 0 moves with token 1, by" in said


@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated"
)  # older versions know no other name
@pytest.mark.parametrize("name", model_contestants.OTHERS)
def test_models_of_transformers_keep_what_their_adapters_offer(name):
    peer("torch"), peer("transformers")
    found = models.conformance(model_contestants.OTHERS[name]())
    assert [x for x in found if x.kind in ("broken", "refused")] == []
    assert ("padding", "unequal lengths", "kept") in found


def test_a_t5_whose_decoder_is_never_masked_is_found(monkeypatch):
    """As that of TransformerLens was."""
    peer("torch"), peer("transformers")
    t5 = importlib.import_module("transformers.models.t5.modeling_t5")

    def unmasked(*, config, inputs_embeds, attention_mask, **more):
        shape = (len(inputs_embeds), 1, inputs_embeds.shape[1], attention_mask.shape[-1])
        return inputs_embeds.new_zeros(shape)

    monkeypatch.setattr(t5, "create_causal_mask", unmasked)
    found = models.conformance(model_contestants.OTHERS["T5"](), promises=["no leakage"])
    assert [x.kind for x in found] == ["broken"]
