"""The benchmark of quality over lag: a text that waits for its whole source is the offline one."""

import re
import sys

import numpy as np
import pytest

from experiments.bench import lag
from experiments.intervals import Interval
from experiments.runs import parameters
from experiments.settings import saved_config
from experiments.tasks import make_task
from tests.peers import package


@pytest.mark.slow
def test_a_run_is_scored_over_its_lag(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lag, "_TEXT", dict(newest=(1,), k=(1,), unit=1))
    monkeypatch.setattr(lag, "_ROWS", 4)
    package("matplotlib", "viz")
    picture = tmp_path / "lag.svg"
    monkeypatch.setattr(sys, "argv", ["x", str(tiny_run), "--limit=4", f"--plot={picture}"])
    lag.main()
    first, *rows = capsys.readouterr().out.splitlines()
    tokens = float(re.fullmatch(r"4 sources of ([\d.]+) tokens, .*", first)[1])
    assert [row.split("BLEU")[0].strip() for row in rows] == [
        "AlignAtt, f = 1",
        "wait-1",
        "all at once",
    ]
    lags = [float(re.search(r"LAAL +([\d.-]+) \(", row)[1]) for row in rows]
    assert lags[2] == pytest.approx(tokens, abs=0.06) and rows[2].endswith("100 % of all")
    assert lags[1] < lags[2] and lags[0] <= lags[2]
    assert all(re.search(r"\) +p = [\d.]+ +LAAL", row) for row in rows[:2])
    assert picture.read_text().count("<path") > 20


def test_all_at_once_is_what_the_translator_writes(tiny_run, monkeypatch):
    monkeypatch.setattr(lag, "_ROWS", 4)
    task = make_task(saved_config(tiny_run), tiny_run / "assets")
    params, tokenizer = parameters(task, tiny_run), task.corpus.tokenizer
    sources = [example["source"] for example in task.examples("test", 3)]
    ids = [tokenizer.frame.read(tokenizer.encode(source), 32) for source in sources]
    found = lag.written(lag.program(task), task, params, lag._ALL, ids)
    longest = -(-max(map(len, ids)) // 16) * 16 * 5 // 4 + 8
    expected = task.translator(params, max_new_tokens=longest).texts(sources)
    assert task.corpus.output_tokenizer.decode_batch([own for own, _ in found]) == expected
    for (own, places), source in zip(found, ids, strict=True):
        assert len(own) == len(places) and set(places.tolist()) <= {len(source)}
    assert any(own for own, _ in found)


def test_a_policy_has_its_name_and_its_lag():
    found = lag.point(lag.title(lag.WaitK(3)), "BLEU", Interval(9, 8, 10), "", [2.0, 4.0], [4, 8])
    assert str(found).split() == ("wait-3 BLEU 9 (8 to 10) LAAL 3 (2 to 4), 50 % of all".split())
    chosen = lag.policies([(0, 1)], newest=(2,), k=(5,), unit=14)
    assert chosen == [lag.AlignAtt(2, ((0, 1),)), lag.WaitK(5, 14), lag._ALL]


@pytest.mark.parametrize(
    ("d", "size", "n"), [([3, 3, 5], 5, 2), ([1, 2, 3, 4], 9, 7), ([4.0], 4.0, 3)]
)
def test_the_lag_is_that_of_the_formula(d, size, n):
    """Written out, term by term."""
    gamma, total, tau = max(len(d), n) / size, 0.0, 0
    for t, arrived in enumerate(d, start=1):
        total, tau = total + arrived - (t - 1) / gamma, t
        if arrived >= size:
            break
    assert lag.lagging(d, size, n) == pytest.approx(total / tau)
    with pytest.raises(ValueError, match="got 0 delays"):
        lag.lagging(np.zeros(0), 1, 1)
