"""A run from its first step to its scores on a GPU, beside the same run on this machine's CPU."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def trained(workdir, platform, *changes):
    """Metrics of validation and test of a run."""
    run = [f"--workdir={workdir}", "--config=configs/copy_task.py:tiny", *changes]
    for launcher in ("train", "evaluate"):
        subprocess.run(
            [
                sys.executable,
                "-m",
                f"experiments.{launcher}",
                *(run if launcher == "train" else run[:1]),
            ],
            cwd=ROOT,
            check=True,
            env=os.environ | {"JAX_PLATFORMS": platform},
        )
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("dtype, off", [("float32", 2e-3), ("bfloat16", 3e-2)])
def test_a_run_on_the_gpu_learns_what_it_learns_on_the_cpu(dtype, off, tmp_path):
    changes = (f"--config.model.dtype={dtype}",)
    here, there = (trained(tmp_path / name, name, *changes) for name in ("cuda", "cpu"))
    first, last = ([x["nll"] for x in run if "nll" in x] for run in (here, there))
    assert len(first) == len(last) > 2
    assert first == pytest.approx(last, rel=off)
