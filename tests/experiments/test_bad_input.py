"""What a person can put right is one line on stderr and exit code 2, and nothing is lost."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import libreoffice
from experiments import keys, tiny_checkpoints
from tests.experiments.conftest import ROOT, STEPS, TINY


def contents(folder):
    """Every file with its bytes, but for the lock that any start leaves."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_process_ends_with_code_2_and_one_line(environment, tmp_path):
    command = [sys.executable, "-m", "experiments.train", "--config=configs/no.py"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    said = "error: --config names configs/no.py, which is no file; see configs/ for what there is."
    assert done.stderr == said + "\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "has no get_config(arg) that returns a ConfigDict"),
        ("def get_config(:\n", "could not be read: invalid syntax"),
        ("import there_is_no_such_module\n", "No module named 'there_is_no_such_module'"),
        ("def get_config():\n    return {}['steps']\n", "could not be read: 'steps'"),
    ],
)
def test_a_config_file_that_cannot_be_used(refused, tmp_path, text, said):
    path = tmp_path / "mine.py"
    path.write_text(text)
    line = refused("train", f"--config={path}", f"--workdir={tmp_path / 'run'}")
    assert said in line and "mine.py" in line
    assert not (tmp_path / "run").exists()


def test_nothing_to_train_or_nowhere_to_put_it(refused, tmp_path):
    for given in (["--config=configs"], ["--config", "configs/no.py:tiny"]):
        assert "which is no file" in refused("train", *given, f"--workdir={tmp_path / 'run'}")
    assert "--config is missing" in refused("train", f"--workdir={tmp_path}")
    assert "--workdir is missing" in refused("train", TINY)
    said = refused("train", f"{TINY},huge", f"--workdir={tmp_path / 'run'}")
    assert "no variant 'huge'; it has tiny, fr" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--config.stepss=1", "the config has no key stepss; did you mean train.steps?"),
        ("--config.train.stepz=1", "no key train.stepz; did you mean train.steps? --help=config"),
        (
            "--config.train.stepz=none",
            "no key train.stepz; did you mean train.steps? --help=config",
        ),
        ("--config.train.step=1", "no key train.step; did you mean train.steps? --help=config"),
        ("--config.optim.lr=1", "no key optim.lr; --help=config"),
        ("--config.checkpoint.best=1", "did you mean checkpoint.best_mode?"),
        (
            "--config.data.options.size=9",
            "no key data.options.size: the data source phrases takes no options. Leave it out;",
        ),
        ("--config.data.name=copy --config.data.options.sise=9", "did you mean data.options.size?"),
        ("--config.train.steps.more=1", "steps.more"),
        ("--config.train.steps=1.5", "train.steps is '1.5'; expected a whole number"),
        ("--config.train.steps=0", "config.train.steps is 0; expected a whole number, 1 or more"),
        ("--config.optim.b2=1.0", "optim.b2 is 1.0; expected a number, 0 or more and below 1"),
        ("--config.optim.name=magic", "optim.name is 'magic'; expected one of adamw"),
        ("--config.model.qk_norm=maybe", "qk_norm is 'maybe'; expected true or false"),
        (
            "--config.task=magic",
            "config.task is 'magic'; expected one of captioning, classification,",
        ),
        ("--config.mesh.tensor=64", "tensor 64 x seq 1 does not fit"),
        ("--config.model.num_heads=5", "num_heads is 5"),
        ("--config.model.head_dim=3 --config.model.positions=rope", "heads of size 3; rotary"),
        ("--config.model.dim=7 --config.model.num_heads=1", "dim is 7; sinusoidal"),
        ("--config.model.relative_distance=9 --config.model.positions=relative", "more than half"),
        ("--config.loss.chunks=32", "target_len makes in training and evaluation: 8, 16, 32"),
        ("--config.loss.alignment_layer=4", "alignment_layer is 4; the decoder has 1 layers"),
        (
            "--config.loss.alignment_head=2",
            "loss.alignment_head is 2; the decoder has 2 heads, from 0.",
        ),
        ("--config.evaluate.alignment.layer=4", "layer is 4; the decoder has 1 layers"),
        ("--config.evaluate.alignment.head=9", "head is 9; the decoder has 2 heads"),
        ("--config.evaluate.bleu_tokenize=magic", "bleu_tokenize is 'magic'"),
        (
            "--config.model.positions=learned --config.evaluate.decoding.max_new_tokens=33",
            "max_new_tokens is 33; the table of learned positions has 32",
        ),
        (
            "--config.checkpoint.best_metric=bleu --config.evaluate.examples=0",
            "of 1 or more measures",
        ),
        ("--config.checkpoint.best_metric=loss", "expected 'min', as less is better"),
        ("--config.checkpoint.best_metric=tag_f1", "evaluate.tags of 1 or more measures"),
        ("--config.train.accumulate=3", "data.batch_size is 8, which makes batches of 8 rows"),
        ("--config.init.new=gates", "init.new is 'gates', but init.from is none; name the run"),
        ("--config.data.name=magic", "no data source 'magic'"),
        ("--resume=maybe", "<auto|must|never>"),
        ("--magic=1", "there is no flag --magic"),
        ("--wrokdir=x", "did you mean --workdir?"),
        ("--num_beams=3", "there is no flag --num_beams"),  # there is, for evaluate
        ("--confg.train.steps=3", "did you mean --config.train.steps?"),
        ("extra", "got extra; expected only flags"),
    ],
)
def test_a_wrong_key_or_value_is_named_before_anything_is_made(
    refused, in_production, tmp_path, override, said
):
    assert said in refused("train", TINY, *override.split(), f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


OUT_OF_RANGE = """
    seed=-1 data.mode=magic model.activation=magic model.dtype=magic loss.label_smoothing=1.5
    loss.alignment=1.0 loss.alignment_weight=-1.0 loss.alignment_coverage=-1.0 loss.alignment_share=0.0
    loss.alignment_head=-1 loss.alignment_head_weight=-1.0
    optim.learning_rate=-1 optim.learning_rate=nan optim.learning_rate=inf optim.learning_rate=fast
    train.steps=many checkpoint.best_metric=magic checkpoint.keep=0 evaluate.examples=-1
    evaluate.alignment.row_offset=3 evaluate.decoding.num_beams=0 evaluate.decoding.max_new_tokens=1
    evaluate.decoding.length_penalty=-1
"""


@pytest.mark.parametrize("given", OUT_OF_RANGE.split())
def test_a_key_takes_no_value_out_of_its_range(given):
    name, _, text = given.partition("=")
    key = keys.of(libreoffice.get_config("tiny"))[name]
    assert not key.takes(key.read(text))


def test_gold_links_that_the_data_does_not_have_claim_no_work_directory(refused, tmp_path):
    for name, text in (("a.en", "a cat\n"), ("a.fr", "un chat\n")):
        (tmp_path / name).write_text(text * 30)
    name = f"files:{tmp_path / 'a.en'},{tmp_path / 'a.fr'}"
    given = (TINY, f"--config.data.name={name}", "--config.loss.alignment=gold")
    line = refused("train", *given, f"--workdir={tmp_path / 'run'}")
    assert f"'gold' but {name} has no gold word links; take 'latent'" in line
    given = (TINY, f"--config.data.name={name}", "--config.evaluate.tags=5")
    line = refused("train", *given, f"--workdir={tmp_path / 'run'}")
    assert f"config.evaluate.tags is 5, but {name} has no phrases in validation" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_workdir_of_another_config_is_refused_and_kept(refused, launched, copied_run):
    before = contents(copied_run)
    changes = ("--config.data.truncation=cut", "--config.train.steps=4")
    other = (TINY, *STEPS, *changes, f"--workdir={copied_run}")
    line = refused("train", *other)
    assert 'data.truncation was "drop", is "cut"' in line and "--resume=never" in line
    assert contents(copied_run) == before
    code, _, _ = launched("train", *other, "--resume=never")
    assert code == 0
    aside = contents(copied_run / "previous-1")
    assert {path: aside.get(path) for path in before} == before
    assert json.loads((copied_run / "config.json").read_text())["data.truncation"] == "cut"


def damage(checkpoint, how):
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    if how == "overwritten":
        for path in files:
            if "d" in path.parts:
                path.write_bytes(b"nonsense")
    else:
        for path in sorted(files)[::2]:
            path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["overwritten", "half written"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    launched, copied_run, tiny_run, parameters, how
):
    damage(copied_run / "checkpoints" / "32", how)
    code, out, _ = launched("train", TINY, *STEPS, f"--workdir={copied_run}")
    assert code == 0
    assert "checkpoint of step 32 cannot be read" in out and "going on from step 28" in out
    assert (copied_run / "unreadable" / "32").is_dir()
    jax.tree.map(np.testing.assert_array_equal, parameters(copied_run), parameters(tiny_run))


def test_no_checkpoint_left_is_refused_and_nothing_is_begun_anew(refused, copied_run):
    for step in ("28", "32"):
        damage(copied_run / "checkpoints" / step, "overwritten")
    line = refused("train", TINY, *STEPS, f"--workdir={copied_run}")
    assert "none of the checkpoints" in line and "start over with" in line
    assert sorted(os.listdir(copied_run / "checkpoints")) == ["28", "32"]
    assert "no checkpoint" in refused("evaluate", f"--workdir={copied_run}")


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (b"", b"un chat\n" * 30, "a.en, line 1: the file is empty"),
        (b"a cat\n" * 30, b"un chat\n" * 29, "a.en, line 30: no partner"),
        (b"a cat\n" * 5, b"un chat\n" * 4 + b"\xe9t\xe9\n", "a.fr, line 5: not UTF-8"),
        (
            b"a cat\n" * 8 + b" \na cat\n",
            b"un chat\n" * 10,
            "a.en, line 9: the source text is empty",
        ),
        (b"a cat\n", None, "a.fr cannot be read"),
    ],
)
def test_parallel_files_are_told_by_file_and_line(refused, tmp_path, source, target, said):
    (tmp_path / "a.en").write_bytes(source)
    if target is not None:
        (tmp_path / "a.fr").write_bytes(target)
    name = f"--config.data.name=files:{tmp_path / 'a.en'},{tmp_path / 'a.fr'}"
    assert said in refused("train", TINY, name, f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("libreoffice_help/en-fr", ("there is no apt-get here", "libreoffice-help-fr_*.deb")),
        ("greek_english", (".whl",)),
    ],
)
def test_data_out_of_reach_say_which_file_goes_where(refused, monkeypatch, tmp_path, name, said):
    monkeypatch.setenv("CROSSATTN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PATH", str(tmp_path))  # No apt-get in it.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    given = (TINY, f"--config.data.name={name}", f"--workdir={tmp_path / 'run'}")
    line = refused("train", *given)
    assert all(part in line for part in (*said, str(tmp_path / "data" / "downloads")))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_its_step(refused, tmp_path):
    given = (TINY, "--config.optim.learning_rate=1e30", f"--workdir={tmp_path}")
    line = refused("train", *given)
    assert "step 2: the loss is nan" in line and "Try a lower learning rate" in line


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("xla_flags=xla_dump_to=dump,xla_there_is_none=1", "compile option: 'xla_there_is_none'"),
        ("offload_optimizer=true", "offload_optimizer needs a mesh, and there is one device"),
    ],
)
def test_what_a_device_cannot_do_is_refused_before_a_run_begins(refused, tmp_path, flag, said):
    config = f"--config={ROOT}/configs/copy_task.py:tiny"
    line = refused("train", config, f"--config.train.{flag}", f"--workdir={tmp_path / 'run'}")
    assert said in line and not (tmp_path / "run").exists()


def test_nothing_is_trained_from_a_config_alone(refused, tmp_path):
    tiny_checkpoints.write("t5", tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "alone")
    config = f"--config={ROOT}/configs/finetune.py:tiny"
    begun = f"--config.init.from={tmp_path / 'alone'}"
    assert "safetensors" in refused("train", config, begun, f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem)
        for path in sorted((ROOT / "experiments" / "bench").glob("*.py"))
        if re.search(r"task_of\(|given\(__doc__", path.read_text())
    ],
)
def test_a_benchmark_of_a_run_that_is_not_there_is_one_line(path, monkeypatch, tmp_path, capsys):
    runs = [str(tmp_path / "none")] * (2 if path.stem == "drawn" else 1)
    monkeypatch.setattr(sys, "argv", [str(path), *runs])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
    # Each reads runs alone, or lacks a package; that of lag also reads a Whisper.
    assert "there is no run in" in said or "pip install" in said or path.stem == "lag"
