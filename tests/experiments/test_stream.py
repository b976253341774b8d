"""A run on a stream: killed, it goes on as if never stopped; what it cannot do, it says."""

import json

import jax
import numpy as np
import pytest

from crossattn.data.sources import open_source
from tests.experiments.conftest import TINY

OPTIONS = (
    TINY,
    "--config.train.steps=16",
    "--config.train.log_every=1",
    "--config.checkpoint.every=4",
    "--config.evaluate.examples=0",
)


@pytest.fixture
def stream(tmp_path):
    """The flags that name the data: three shards of phrases, and where the tokenizer is kept."""
    pairs = open_source("phrases", "train")[:900]
    for number in range(3):
        lines = [json.dumps({"en": e["source"], "fr": e["target"]}) for e in pairs[number::3]]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return (
        f"--config.data.name=stream:{tmp_path}/*.jsonl",
        "--config.data.options.source_column=en",
        "--config.data.options.target_column=fr",
        f"--config.data.data_dir={tmp_path}/data",
    )


def test_a_killed_run_on_a_stream_ends_as_the_one_left_alone(
    stream, parameters, killed_at, launched, tmp_path
):
    alone, killed = f"--workdir={tmp_path}/alone", tmp_path / "killed"
    assert launched("train", *OPTIONS, *stream, alone)[0] == 0
    command = ["train", *OPTIONS, *stream, f"--workdir={killed}"]
    killed_at(9, killed, *command)
    code, out, err = launched(*command)
    assert code == 0 and "going on from the checkpoint of step" in out, (out, err)
    jax.tree.map(np.testing.assert_array_equal, parameters(killed), parameters(tmp_path / "alone"))
    lines = map(json.loads, (killed / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [16]


def test_what_a_stream_cannot_is_refused_in_one_line(stream, refused, tmp_path):
    workdir = f"--workdir={tmp_path}/run"
    said = refused("train", *OPTIONS, *stream, workdir, "--config.data.mode=bucket")
    assert "a stream is only packed, 'pack'" in said
    assert "there is nothing to prepare" in refused("prepare", *OPTIONS, *stream)
    said = refused("train", *OPTIONS, *stream, workdir, "--config.data.options.source_column=de")
    assert "no text under the key 'de'" in said
    said = refused("train", *OPTIONS, *stream, workdir, "--config.data.options.lanes=3")
    assert "lanes is 3; expected a divisor of config.data.batch_size, 8" in said
    said = refused("train", *OPTIONS, *stream, workdir, "--config.data.options.at_end=stop")
    assert "expected one of repeat, wait" in said
