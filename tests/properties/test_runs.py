"""A run with damaged files or hostile settings: its own parameters in the end, or one line that says no."""

import json
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.experiments.conftest import (  # noqa: F401
    STEPS,
    TINY,
    _keep_compiled_code,
    launched,
    parameters,
    tiny_run,
)
from tests.properties import examples
from tests.properties.damage import TEXTS, damaged

pytestmark = (
    pytest.mark.slow
)  # each example is a launcher; what refusals say is in tests/experiments

_VALUES = (
    "-1", "0", "1", "3", "7", "-0.5", "0.0", "0.5", "1.5", "nan", "inf", "-inf", "", "None", "True",
    "many", "[]", "{}", "()", "../x", "a b", "\u00e9", "1e400", "0x10", "-7",
)  # fmt: skip
# No run of these could mean anything.
_NEVER_NEGATIVE = {
    "optim.learning_rate", "optim.weight_decay", "optim.clip_norm", "optim.eps", "optim.warmup_steps",
    "model.dropout_rate", "model.attention_dropout_rate", "model.mlp_dropout_rate", "model.dim",
    "model.num_heads", "model.mlp_dim", "model.encoder_layers", "model.decoder_layers", "data.batch_size",
    "data.source_len", "data.target_len", "tokenizer.vocab_size", "train.steps", "train.accumulate",
    "checkpoint.every", "checkpoint.keep", "loss.label_smoothing", "loss.chunks", "loss.z_loss",
    "evaluate.examples", "evaluate.decoding.num_beams", "evaluate.decoding.batch_size",
}  # fmt: skip


@pytest.fixture
def ends_well(launched):  # noqa: F811
    """Starts a launcher that must end with code 0, or with 2 and one line: (code, that line)."""

    def run(launcher, *arguments):
        code, out, err = launched(launcher, *arguments)
        lines = [line for line in err.splitlines() if not line.startswith("note: ")]
        assert "Traceback" not in out + err and code in (0, 2, None), (code, out, err)
        if code == 2:
            assert len(lines) == 1 and lines[0].startswith("error: "), err
        return code or 0, lines[0] if code else ""

    return run


@pytest.fixture
def copied(tiny_run, tmp_path):  # noqa: F811
    """Makes a copy of the finished run, with its last checkpoint or without."""

    def copy(finished=True):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run = shutil.copytree(tiny_run, tmp_path / "run")
        if not finished:
            shutil.rmtree(max((run / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name)))
        return run

    return copy


@examples(8)
@given(data=st.data())
def test_a_run_gone_on_with_after_damage_ends_with_its_own_parameters_or_a_line(
    data, copied, ends_well, parameters, tiny_run  # noqa: F811
):  # fmt: skip
    run = copied(finished=False)
    newest = max((run / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    where = data.draw(st.sampled_from([newest, newest.parent, run / "assets", run]))
    files = [p for p in where.rglob("*") if p.is_file() and p.name != ".lock"]
    files.sort(key=lambda p: (p.stat().st_size, p))  # names of Orbax's files differ from run to run
    path = data.draw(st.sampled_from(files))
    how = data.draw(st.sampled_from(["damaged", "deleted", "replaced"]))
    if how == "damaged":
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    elif how == "deleted":
        path.unlink()
    else:
        other = data.draw(st.sampled_from(files))
        path.write_bytes(other.read_bytes() if other != path else b"")
    code, said = ends_well("train", TINY, *STEPS, f"--workdir={run}")
    if code:
        assert path.name != "metrics.jsonl", said
    else:
        same = jax.tree.map(np.array_equal, parameters(run), parameters(tiny_run))
        assert all(jax.tree.leaves(same)), f"{path.relative_to(run)} {how}: other parameters"


@examples(20)
@given(data=st.data())
def test_a_setting_of_any_value_trains_or_is_refused_in_a_line(data, ends_well, tiny_run, tmp_path):  # noqa: F811
    keys = sorted(json.loads((tiny_run / "config.json").read_text()))
    key, value = data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(_VALUES))
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    short = ("--config.train.steps=2", "--config.checkpoint.every=2")
    options = (*STEPS, *short, f"--config.{key}={value}", f"--workdir={tmp_path / 'run'}")
    code, _ = ends_well("train", TINY, *options)
    assert code or key not in _NEVER_NEGATIVE or not value.startswith("-")


_READERS = (("train", TINY, *STEPS), ("evaluate",), ("translate", "a word"))


@examples(10)
@given(data=st.data(), command=st.sampled_from(_READERS))
def test_a_config_that_holds_anything_is_read_or_refused_in_a_line(
    data, command, copied, ends_well
):
    run = copied()
    path = run / "config.json"
    path.write_bytes(data.draw(TEXTS | damaged(path.read_bytes())))
    ends_well(*command, f"--workdir={run}")


@examples(6)
@given(data=st.data(), at_end=st.booleans())
def test_a_log_damaged_in_its_last_line_stops_no_resume(data, at_end, copied, ends_well):
    run = copied(finished=False)
    path = run / "metrics.jsonl"
    content = path.read_bytes()
    end = content.rfind(b"\n", 0, -1) + 1 if at_end else 0
    path.write_bytes(content[:end] + data.draw(damaged(content[end:])))
    code, said = ends_well("train", TINY, *STEPS, f"--workdir={run}")
    assert not (code and at_end), said
