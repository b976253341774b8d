"""Gains of passages by their overlap: sums of the chunks that are kept, the command, and what is refused."""

import json

import numpy as np
import pytest

from experiments import launch, overlaps
from experiments.evaluate import of_all

RNG = np.random.default_rng(0)
WEIGHT, OVERLAP = RNG.integers(1, 33, 200).astype(float), RNG.integers(4, 33, 200) / 32
GROUP = [f"page{i // 10}" for i in range(200)]


def results(*kinds):
    """Results of a run with a loss of each chunk and kind."""
    losses = {kind: (WEIGHT * RNG.uniform(3, 5, 200)).tolist() for kind in kinds}
    known = {"overlap": OVERLAP.tolist(), "weight": WEIGHT.tolist(), "group": GROUP}
    return {"chunks": known | losses}


@pytest.fixture
def runs():
    return {"plain": results("nll"), "retro": results("nll", "nll_without", "nll_random")}


def test_gains_are_of_the_chunks_below_each_bound(runs):
    kept, lines = overlaps.gains(runs)
    losses = {name: np.array(x) for name, x in runs["retro"]["chunks"].items() if "nll" in name}
    others = {
        "retro over no passages": losses["nll_without"],
        "retro over random passages": losses["nll_random"],
        "retro over plain": np.array(runs["plain"]["chunks"]["nll"]),
    }
    assert list(lines) == list(others)
    assert list(kept) == ["0.125", "0.25", "0.375", "0.5", "0.625", "0.75", "0.875", "1"]
    for place, (bound, tokens) in enumerate(kept.items()):
        mask = OVERLAP <= float(bound)
        assert tokens == WEIGHT[mask].sum()
        for name, other in others.items():
            gain = (other - losses["nll"])[mask].sum() / WEIGHT[mask].sum()
            own = lines[name][place]
            assert own.value == pytest.approx(gain) and own.low < gain < own.high


def test_files_are_drawn_together(runs):
    wide = overlaps.gains(runs)[1]["retro over plain"][-1]
    for own in runs.values():
        own["chunks"]["group"] = ["one page", *["another"] * 199]
    narrow = overlaps.gains(runs)[1]["retro over plain"][-1]
    assert narrow.value == wide.value and (narrow.low, narrow.high) != (wide.low, wide.high)


def test_losses_of_members_are_averaged(runs):
    two = {"a": runs["retro"], "b": results("nll", "nll_without", "nll_random")}
    one, other = (np.array(own["chunks"]["nll"]) for own in two.values())
    found = of_all(two)["chunks"]
    np.testing.assert_allclose(found["nll"], (one + other) / 2)
    assert found["group"] == GROUP and found["overlap"] == OVERLAP.tolist()


def test_a_bound_below_all_chunks_is_left_out(runs):
    for own in runs.values():
        own["chunks"]["overlap"] = [0.3] * 200
    assert list(overlaps.gains(runs)[0])[0] == "0.375"


def test_runs_of_other_chunks_or_of_none_are_refused(runs):
    runs["retro"]["chunks"]["weight"][3] += 1
    with pytest.raises(
        launch.Refused, match="retro has no losses of chunks, or of others than plain"
    ):
        overlaps.gains(runs)
    for own in ({}, {"chunks": {}}):
        with pytest.raises(launch.Refused, match="old has no losses of chunks"):
            overlaps.gains({"old": own, "retro": runs["retro"]})


def test_a_table_and_a_picture_have_every_gain(runs):
    kept, lines = overlaps.gains(runs)
    rows = overlaps.table(kept, lines)
    assert rows[0] == ("overlap at most", "tokens", *lines) and len(rows) == 9
    assert rows[2][:3] == ("0.25", str(kept["0.25"]), str(lines["retro over no passages"][1]))
    (axes,) = overlaps.draw(kept, lines).axes
    drawn = [line for line in axes.get_lines() if len(line.get_ydata()) == 8][::3]
    assert [list(line.get_ydata()) for line in drawn] == [
        [x.value for x in line] for line in lines.values()
    ]
    assert [text.get_text() for text in axes.get_xticklabels()] == list(kept)


def test_the_command_prints_and_draws_gains(runs, tmp_path, launched):
    for name, own in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "metrics.jsonl").write_text("")
        (tmp_path / name / "results-test.json").write_text(json.dumps(own))
    picture, page = tmp_path / "overlaps.png", tmp_path / "overlaps.html"
    given = ["compare", tmp_path / "plain", tmp_path / "retro", "--split=test", f"--html={page}"]
    code, said, _ = launched(*given, "--by_overlap", f"--plot={picture}")
    assert code == 0 and "Gain by overlap, nats a token, test" in said
    assert f"{tmp_path / 'retro'} over no passages" in said
    assert picture.stat().st_size > 1000 and "<h2>Gain by overlap</h2>" in page.read_text()
    code, _, said = launched(*given, "--by_overlap", "--by_length=5")
    assert code != 0 and "--by_length and --by_overlap are one picture each; give one of" in said
