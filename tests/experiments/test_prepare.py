"""Preparing by command: training reads what it leaves, and is the training that it would have been."""

import jax
import numpy as np
import pytest

from experiments.tasks import corpus
from tests.experiments.conftest import STEPS, TINY


@pytest.fixture
def prepared(launched, tmp_path):
    """The flag that names a data folder in which the corpus of the tiny run is prepared."""
    flag = f"--config.data.data_dir={tmp_path / 'data'}"
    code, out, _ = launched("prepare", TINY, flag, "--workers=1")
    assert code == 0 and out.startswith(f"3164 of 3164 examples are in {tmp_path}/data/prepared/")
    return flag


def refuse(*arguments, **options):
    raise AssertionError("this was to be read from what is prepared")


@pytest.mark.slow
def test_a_killed_run_on_a_prepared_corpus_ends_as_the_one_that_tokenised_in_memory(
    prepared, tiny_run, parameters, killed_at, launched, monkeypatch, tmp_path
):
    workdir = tmp_path / "run"
    command = ["train", TINY, *STEPS, prepared, f"--workdir={workdir}"]
    killed_at(14, workdir, *command)
    monkeypatch.setattr(corpus, "prepare_examples", refuse)
    monkeypatch.setattr(corpus, "train_tokenizer", refuse)
    code, out, err = launched(*command)
    assert code == 0 and "going on from the checkpoint of step" in out, (out, err)
    jax.tree.map(np.testing.assert_array_equal, parameters(workdir), parameters(tiny_run))


@pytest.mark.slow
def test_training_prepares_a_large_corpus_itself(
    launched, monkeypatch, tiny_run, parameters, tmp_path
):
    monkeypatch.setattr(corpus, "_IN_MEMORY", 1000)
    monkeypatch.setattr(corpus, "prepare_examples", refuse)
    data = f"--config.data.data_dir={tmp_path / 'data'}"
    code, out, err = launched("train", TINY, *STEPS, data, f"--workdir={tmp_path / 'run'}")
    assert code == 0, (out, err)
    assert len(list((tmp_path / "data" / "prepared").glob("phrases-train-*/manifest.json"))) == 1
    jax.tree.map(np.testing.assert_array_equal, parameters(tmp_path / "run"), parameters(tiny_run))


def test_a_tokenizer_learns_from_examples_in_equal_distances_where_there_are_too_many(
    launched, monkeypatch, tmp_path
):
    learnt = []
    monkeypatch.setattr(corpus, "_SAMPLE", 10)
    real = corpus.train_tokenizer
    monkeypatch.setattr(
        corpus, "train_tokenizer", lambda texts, *rest: learnt.append(texts) or real(texts, *rest)
    )
    data = f"--config.data.data_dir={tmp_path / 'data'}"
    assert launched("prepare", TINY, data, "--workers=1")[0] == 0
    (texts,) = learnt
    train = corpus.open_source("phrases", "train")
    expected = [train[i * 3164 // 10][side] for i in range(10) for side in ("source", "target")]
    assert texts == expected


def test_what_cannot_be_prepared_is_refused_in_one_line(refused, tmp_path):
    data = f"--config.data.data_dir={tmp_path / 'data'}"
    assert "no example is short enough" in refused(
        "prepare", TINY, data, "--config.data.source_len=2", "--config.data.target_len=2"
    )
    (tmp_path / "file").write_text("")
    said = refused("prepare", TINY, f"--config.data.data_dir={tmp_path / 'file'}")
    assert "cannot be written: Not a directory" in said
