"""The table of all architectures: its rows find themselves, and hold what was measured."""

import json

import jax
import numpy as np
import pytest

from configs import emoji_group, transfer
from crossattn.train.loop import fresh_state
from crossattn.train.program import make_program
from experiments import zoo
from experiments.settings import check, train_config
from experiments.tasks import make_task
from tests.experiments.test_configs import CONFIGS, get_config


def test_every_config_is_a_row_or_is_the_same_as_one():
    found = zoo.experiments()
    # These translate as libreoffice does.
    others = {"copy_task", "greek_english", "wmt14_de_en"}
    assert {name.partition(":")[0] for name in found} == set(CONFIGS) - others
    for name, config in found.items():
        if (parent := zoo.parent(name)) is not None:
            check(parent)
            config.init["from"] = "runs/parent"
        check(config)
    assert zoo.parent("transfer:de").data.name == "phrases/ja-en"
    few = zoo.parent("transfer:de", 3)  # --steps=3
    assert few.train.steps == few.checkpoint.every == 3 < zoo.parent("transfer:de").train.steps
    joined = zoo._joined(found)
    assert "t5_11b, t5_1b:span_corruption" in joined and "libreoffice" in joined
    names = [name for together in joined for name in together.split(", ")]
    assert sorted(names) == sorted(found)


@pytest.mark.slow
def test_rows_are_measured_and_one_that_fails_stops_no_other(launched, monkeypatch, tmp_path):
    good, bad = get_config("lm_small", "tiny"), get_config("lm_small", "tiny")
    reads = get_config("libreoffice", "tiny")
    good.train.steps, reads.train.steps, bad.model.num_heads = 4, 4, 5
    rows = {"lm_small:broken": bad, "lm_small": good, "libreoffice": reads}
    monkeypatch.setattr(zoo, "experiments", lambda steps: rows)
    code, out, err = launched("zoo", "--seeds=2", f"--table={tmp_path / 'zoo.json'}")
    assert code == 1 and "3 rows of 2 runs, scored on test" in out
    table = [line.split(" | ") for line in out.splitlines() if line.startswith("|")]
    assert [row[0].strip("| ") for row in table][2:] == ["decoder", "decoder", "transformer"]
    broken, whole, reads = json.loads((tmp_path / "zoo.json").read_text())["rows"]
    assert "dim" in broken["failed"] and "\n" not in broken["failed"] and not whole["failed"]
    assert len(set(whole["reached"])) == 2 and whole["metric"] == "nll"
    assert whole["baseline"] == "trigrams" and 0 < whole["must_beat"] < np.log(400)
    assert not whole["blind"] and not {*reads["reached"]} & {*reads["blind"], *reads["shuffled"]}
    assert "failed" in err and "**none**" in err  # after four steps


@pytest.mark.slow
def test_a_row_begins_with_its_parent_and_keeps_what_it_does_not_train(launched, monkeypatch):
    child, seen = get_config("transfer", "de,tiny"), []
    child.train.steps = 2
    monkeypatch.setattr(zoo, "experiments", lambda steps: {"transfer:de": child})
    monkeypatch.setattr(transfer, "ZOO_PARENT", {"de": ("parent", 3)})
    trained = zoo._trained

    def kept(program, begun, *given):
        seen[:] = begun.params, *trained(program, begun, *given)
        return seen[1:]

    monkeypatch.setattr(zoo, "_trained", kept)
    code, out, _ = launched("zoo", "--seeds=2")
    assert code == 0 and "| transformer | transfer:de | translation" in " ".join(out.split())
    begun, members, _ = seen
    name = "target_input"
    first = begun[name]["embedding"]["table"]
    assert np.array_equal(first[0], first[1])
    for member in members:
        assert np.array_equal(member[name]["embedding"]["table"], first[0])
    (one, two), name = members, "source_input"
    assert not np.array_equal(one[name]["embedding"]["table"], two[name]["embedding"]["table"])


@pytest.mark.slow
def test_copies_that_are_trained_side_by_side_are_as_alone():
    config = get_config("libreoffice", "tiny")
    config.train.steps, config.train.seeds = 3, 2
    values, task = train_config(config), make_task(config)
    program = make_program(task, values, None)
    config = config.copy_and_resolve_references()
    config.data.blind = True

    def trained(*changes):
        begun = fresh_state(program)
        return zoo._trained(program, begun, task, values, changes)

    blank, same = make_task(config).seen, lambda batch: batch
    both = trained(same, blank)
    for found, expected in zip(both, [*trained(same), *trained(blank)], strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    leaves = [jax.tree.leaves(each) for each in both]
    assert any(not np.array_equal(x, y) for x, y in zip(*leaves, strict=True))


@pytest.mark.slow
def test_the_validation_split_is_scored_alone_to_choose_steps(launched, monkeypatch, tmp_path):
    config = get_config("lm_small", "tiny")
    config.train.steps, scored = 2, []
    monkeypatch.setattr(zoo, "experiments", lambda steps: {"lm_small": config})
    task, whole = type(make_task(config)), type(make_task(config)).split_loss
    monkeypatch.setattr(
        task,
        "split_loss",
        lambda self, params, split, *a: scored.append(split) or whole(self, params, split, *a),
    )
    baselines = task.headline_baselines
    monkeypatch.setattr(
        task,
        "headline_baselines",
        lambda self, split: scored.append(split) or baselines(self, split),
    )
    code, out, _ = launched(
        "zoo", "--seeds=2", "--split=validation", f"--table={tmp_path / 'zoo.json'}"
    )
    assert code == 0 and "scored on validation" in out and scored == ["validation"] * 3
    assert json.loads((tmp_path / "zoo.json").read_text())["split"] == "validation"


def test_baselines_of_the_headline_are_those_of_all_that_have_its_metric():
    task = make_task(get_config("finetune_whisper", "tiny"))
    metric = f"_{task.headline[0]}"
    expected = {key: x for key, x in task.baselines("test").items() if key.endswith(metric)}
    found = task.headline_baselines("test")
    assert {key: x for key, x in found.items() if key.endswith(metric)} == expected != {}


def test_a_name_that_there_is_not_is_one_line(refused):
    assert "--only names lm; expected some of draw," in refused("zoo", "--only=lm")


@pytest.mark.parametrize(
    ("best", "reached", "blind", "said"),
    [
        ("max", [0.6, 0.7, 0.8], [], "all"),
        ("min", [0.6, 0.4, 0.4], [0.45], "2 of 3"),
        ("max", [0.1, 0.4, 0.5], [], "**none**"),  # level is not better
        ("max", [0.6, 0.7, 0.8], [0.1, 0.75], "1 of 3"),
        ("min", [0.4, 0.3], [0.2, 0.6], "**none**"),
    ],
)
def test_a_row_says_how_many_runs_are_better(best, reached, blind, said):
    scores = dict(must_beat=0.5, reached=reached, blind=blind, shuffled=blind)
    row = zoo.Row("some", 5, metric="m", best=best, baseline="most", **scores)
    line = zoo.table([row]).splitlines()[-1]
    assert [cell.strip("| ") for cell in line.split(" | ")][4] == "most: m 0.500"
    assert line.split(" | ")[8].strip() == said
    middle = np.median(reached)
    assert f"{middle:.3f} ({min(reached):.3f} to {max(reached):.3f})" in line


def test_blind_and_shuffled_batches_keep_all_but_the_memory():
    """Rows without an example stay where they are."""
    config = emoji_group.get_config("both,tiny")
    task = make_task(config)
    blind_config = emoji_group.get_config("both,tiny")
    blind_config.data.blind = True
    blind = make_task(blind_config)
    assert task.memory == ("image",) and not make_task(emoji_group.get_config("image,tiny")).memory
    random = np.random.default_rng(0)
    batch = dict(
        image=random.random((4, 2, 2, 3)),
        caption=random.integers(1, 9, (4, 5)),
        caption_segment_ids=np.ones((4, 5), int),
        valid=np.array([1, 0, 1, 1]),
    )
    blank, other = blind.seen(batch), task.shuffled(batch)
    assert not blank["image"].any() and task.seen(batch) is batch
    np.testing.assert_array_equal(other["image"], batch["image"][[3, 1, 0, 2]])
    for name in ("caption", "caption_segment_ids", "valid"):
        assert blank[name] is batch[name] and other[name] is batch[name]


def test_a_shuffled_text_brings_its_length(tmp_path):
    task = make_task(get_config("copy_task", "tiny"))
    batch = next(iter(task.eval_batches("test", None)))
    other, rows = task.shuffled(batch), np.flatnonzero(batch["source_segment_ids"].any(-1))
    for name in ("source", "source_segment_ids", "source_positions"):
        np.testing.assert_array_equal(
            other[name][rows], np.roll(batch[name][rows], len(rows) // 2, 0)
        )
    np.testing.assert_array_equal(other["target_out"], batch["target_out"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["copy_task", "t5_1b:span_corruption", "emoji_captions", "emoji_llava", "help_pages:both"],
)
def test_no_value_of_the_memory_reaches_a_blind_model(name):
    file, _, variant = name.partition(":")
    config = get_config(file, f"{variant},tiny".removeprefix(","))
    config.data.blind = True
    blind = make_task(config)
    seeing = make_task(get_config(file, f"{variant},tiny".removeprefix(",")))
    params = blind.init(jax.random.key(0))
    batch = next(iter(blind.eval_batches("test", None)))
    moved = {name: np.roll(batch[name], 1, 0) for name in blind.memory}

    def losses(task):
        loss = jax.jit(lambda p, x: task.loss(p, x, None)[0])
        return [float(loss(params, x)) for x in (batch, {**batch, **moved})]

    one, other = losses(blind)
    assert one == other and np.isfinite(one)
    key = jax.random.key(1)  # the table trains on blanked batches instead
    blanked = jax.jit(seeing.loss)(params, blind.seen(batch), key)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, blanked, jax.jit(blind.loss)(params, batch, key))
    )
    one, other = losses(seeing)
    assert one != other
