"""A child of a run: it keeps one side's tokenizer and table, and is stored as a delta of the run."""

import json
import shutil

import numpy as np
import pytest

import crossattn as xa
from configs import transfer
from crossattn.data.prepare import is_prepared
from crossattn.data.tokenizers import Tokenizer
from crossattn.functional import flatten
from crossattn.weights import deltas
from experiments import tiny_checkpoints
from experiments.runs import parameters as read
from experiments.runs import parameters_of
from experiments.settings import check, put, saved_config
from experiments.tasks import make_task
from tests.experiments.conftest import ROOT, start
from tests.experiments.test_initial import SHORT

WORDS = (
    ("katze", "hund", "vogel", "haus", "stern", "schule"),
    ("cat", "dog", "bird", "house", "star", "school"),
)


def config(arg):
    return f"--config={ROOT}/configs/transfer.py:{arg},tiny"


@pytest.fixture(scope="module")
def german(tmp_path_factory):
    """Pairs of a language that the parent has not seen."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("pairs")
    picks = [rng.integers(0, 6, 4) for _ in range(400)]
    rows = ("\t".join(" ".join(side[i] for i in pick) for side in WORDS) for pick in picks)
    (folder / "pairs.tsv").write_text("\n".join(rows) + "\n")
    return f"--config.data.name=files:{folder / 'pairs.tsv'}"


@pytest.fixture(scope="module")
def family(tmp_path_factory, german):
    """The folders of a parent and of children, by what is trained."""
    folder = tmp_path_factory.mktemp("family")
    parent = folder / "parent"
    assert start("train", config("parent"), *SHORT, f"--workdir={parent}") == 0
    made = {"parent": parent}
    for name in ("table", "cross", "scratch"):
        given = (german, f"--config.init.from={parent}", f"--workdir={folder / name}")
        assert start("train", config(f"de,{name}"), *SHORT, *given) == 0
        made[name] = folder / name
    return made


def tokenizers(run):
    return [Tokenizer.load(run / "assets", name) for name in ("tokenizer", "target_tokenizer")]


@pytest.mark.slow
def test_a_child_keeps_the_english_tokenizer_and_table_and_has_its_own_source(family, parameters):
    before, (french, english) = flatten(parameters(family["parent"])), tokenizers(family["parent"])
    for name in ("table", "cross"):
        after, (own, kept) = flatten(parameters(family[name])), tokenizers(family[name])
        assert (
            kept == english and own != french and "hund" in "".join(own.tokens(own.encode("hund")))
        )
        changed = {
            k for k, x in after.items()
            if x.shape != before[k].shape or not np.array_equal(x, before[k])
        }  # fmt: skip
        parts = ("source_input",) if name == "table" else ("source_input", ".cross")
        assert changed == {k for k in before if any(part in k for part in parts)}


@pytest.mark.slow
def test_a_child_from_scratch_has_the_tokenizer_and_nothing_else(family, parameters):
    before, after = (flatten(parameters(family[name])) for name in ("parent", "scratch"))
    kernels = [k for k in before if k.endswith("kernel")]
    assert tokenizers(family["scratch"])[1] == tokenizers(family["parent"])[1]
    assert kernels and not any(np.array_equal(before[k], after[k]) for k in kernels)


@pytest.mark.slow
def test_random_cross_attention_begins_afresh_and_the_rest_does_not(
    family, german, launched, parameters, tmp_path
):
    given = (german, f"--config.init.from={family['parent']}", f"--workdir={tmp_path / 'run'}")
    still = ("--config.optim.learning_rate=0", "--config.optim.weight_decay=0")
    assert launched("train", config("de,random"), *SHORT, *still, *given)[0] == 0
    before, after = flatten(parameters(family["parent"])), flatten(parameters(tmp_path / "run"))
    for name in (k for k in before if k.endswith("kernel")):
        assert np.array_equal(before[name], after[name]) == (".cross." not in name)


@pytest.mark.slow
def test_a_child_goes_on_with_its_own_tokenizers(family, german, launched, tmp_path):
    run = shutil.copytree(family["cross"], tmp_path / "run")
    given = (german, f"--config.init.from={family['parent']}", "--config.train.steps=3")
    code, out, err = launched("train", config("de,cross"), SHORT[1], *given, f"--workdir={run}")
    assert code == 0 and "going on from the checkpoint of step 2" in out, err
    assert tokenizers(run) == tokenizers(family["cross"])


@pytest.mark.slow
def test_prepared_data_of_a_child_have_the_tokenizers_of_its_run(
    family, german, launched, tmp_path
):
    given = (german, f"--config.init.from={family['parent']}", f"--config.data.data_dir={tmp_path}")
    code, out, err = launched("prepare", config("de,cross"), *given, "--workers=1")
    assert code == 0 and "examples are in" in out, err
    (kept,) = (tmp_path / "prepared" / "tokenizers").glob("*.json")
    assert Tokenizer.load(kept.parent, kept.stem) == tokenizers(family["cross"])[0]
    saved = saved_config(family["cross"])
    put(saved, {"data.data_dir": str(tmp_path)})
    assert is_prepared(make_task(saved, family["cross"] / "assets").corpus._prepared)


@pytest.mark.slow
def test_a_child_without_the_parents_target_tokenizer_is_refused(
    family, tiny_run, german, refused, tmp_path
):
    def said(*changes):
        text = refused(
            "train", config("de,cross"), *SHORT, german, f"--workdir={tmp_path}/run", *changes
        )
        assert not (tmp_path / "run").exists()
        return text

    begin = f"--config.init.from={family['parent']}"
    assert "which lacks target_tokenizer.json" in said(f"--config.init.from={tiny_run}")
    assert "name the run that has the other side's" in said("--config.init.new=none")
    assert "no run that has the other side's" in said("--config.init.from=tiny:t5")
    assert "joint is True" in said(begin, "--config.tokenizer.joint=true")
    back = (begin, "--config.data.name=phrases/ja-en")  # the parent's: tables of the same shapes
    other = said(*back, "--config.tokenizer.new=target")
    assert "target_input.embedding.table" in other and "belong to its tokenizer" in other
    kept = said(*back, "--config.init.new=nothing")
    assert "source_input.embedding.table" in kept and "belong to its tokenizer" in kept


def exported(launched, run, base, folder):
    code, out, err = launched("export", f"--workdir={run}", f"--to={folder}", f"--delta_of={base}")
    assert code == 0, err
    return out


@pytest.mark.slow
def test_base_and_delta_are_the_run_to_the_bit_for_every_launcher(
    family, launched, parameters, tmp_path
):
    folder = tmp_path / "delta"
    out = exported(launched, family["cross"], family["parent"], folder)
    whole, base = parameters(family["cross"]), parameters(family["parent"])
    given = xa.weights.deltas.read(folder / "delta.safetensors")
    share = sum(x.size for x in given.changed.values()) / sum(
        x.size for x in flatten(whole).values()
    )
    assert f"{share:.1%} of the numbers" in out and 0 < deltas.share(given, whole) == share < 1
    assert all("source_input" in k or ".cross" in k for k in given.changed)
    task = make_task(saved_config(folder), folder / "assets")
    back, wanted = flatten(read(task, folder)), flatten(whole)
    assert back.keys() == wanted.keys() and len(given.changed) < len(flatten(base))
    assert all(np.array_equal(back[k], wanted[k]) for k in wanted)

    texts = [
        launched("translate", f"--workdir={x}", "hund vogel")[:2] for x in (family["cross"], folder)
    ]
    assert texts[0] == texts[1] and texts[0][0] == 0
    for place in (family["cross"], folder):
        assert launched("evaluate", f"--workdir={place}", "--limit=4")[0] == 0
    scores = [json.loads((x / "results-test.json").read_text()) for x in (family["cross"], folder)]
    assert scores[0]["nll"] == scores[1]["nll"] and scores[0]["samples"] == scores[1]["samples"]


@pytest.mark.slow
def test_a_run_begins_from_a_delta_as_from_its_run(family, german, launched, parameters, tmp_path):
    exported(launched, family["cross"], family["parent"], tmp_path / "delta")
    still = ("--config.optim.learning_rate=0", "--config.optim.weight_decay=0")
    more = ("--config.init.new=none", "--config.tokenizer.new=none", german, *SHORT, *still)
    given = (f"--config.init.from={tmp_path / 'delta'}", f"--workdir={tmp_path / 'run'}")
    code, _, err = launched("train", config("de,cross"), *more, *given)
    assert code == 0, err
    after, wanted = flatten(parameters(tmp_path / "run")), flatten(parameters(family["cross"]))
    assert all(np.array_equal(after[k], wanted[k]) for k in wanted)
    assert tokenizers(tmp_path / "run") == tokenizers(family["cross"])


@pytest.mark.slow
def test_a_delta_of_another_base_is_refused_and_a_moved_base_named(
    family, launched, refused, tmp_path
):
    folder = tmp_path / "delta"
    exported(launched, family["cross"], family["parent"], folder)
    line = ("translate", f"--workdir={folder}", "hund")
    assert "is a delta of parameters with SHA-256" in refused(*line, f"--base={family['table']}")
    assert "a delta of one step" in refused(*line, "--step=2")
    moved = shutil.copytree(family["parent"], tmp_path / "moved")
    code, _, err = launched(*line, f"--base={moved}")
    assert code == 0, err
    whole = (f"--workdir={family['cross']}", "hund", f"--base={moved}")
    assert "is no delta; leave it out" in refused("translate", *whole)


@pytest.mark.slow
def test_a_fine_tuned_checkpoint_is_a_delta_that_load_reads(launched, parameters, tmp_path):
    given = tiny_checkpoints.write("t5", tmp_path / "given")
    tuned = (
        f"--config={ROOT}/configs/finetune.py:translation,tiny",
        *SHORT,
        r"--config.optim.train=\.cross\.",
    )
    run, folder = tmp_path / "run", tmp_path / "delta"
    code, _, err = launched("train", *tuned, f"--config.init.from={given}", f"--workdir={run}")
    assert code == 0, err
    exported(launched, run, given, folder)
    wanted = flatten(parameters(run))
    for back in (xa.load(folder / "delta.safetensors", base=given)[1], parameters_of(str(folder))):
        back = flatten(back)
        assert back.keys() == wanted.keys()
        assert all(np.array_equal(back[k], wanted[k]) for k in wanted)


def test_a_run_of_a_model_of_its_own_is_exported_as_a_delta_only(tiny_run, refused, tmp_path):
    assert "--delta_of=RUN" in refused("export", f"--workdir={tiny_run}", f"--to={tmp_path / 'x'}")


@pytest.mark.slow
def test_a_child_with_the_source_of_another_reads_its_language(
    family, german, launched, parameters, refused, tmp_path
):
    begin = f"--config.init.from={family['parent']}"
    made = {name: tmp_path / name for name in ("writes", "stranger", "both", "more")}
    given = ("--config.data.name=phrases/fr-en", f"--workdir={made['writes']}")
    assert start("train", config("fr-de,cross"), *SHORT, begin, *given) == 0
    command = (f"--workdir={made['writes']}", f"--source_of={family['cross']}")
    ours = (f"--to={made['both']}", german.replace("--config.data.name", "--pairs"))
    code, out, err = launched("export", *command, *ours)
    assert code == 0 and "1 of " in out and "is missing" not in err, err
    (reads, _), (_, writes), both = map(tokenizers, (family["cross"], made["writes"], made["both"]))
    assert both == [reads, writes]
    task = make_task(saved_config(made["both"]), made["both"] / "assets")
    back = flatten(read(task, made["both"]))
    source, rest = (flatten(parameters(x)) for x in (family["cross"], made["writes"]))
    for name, x in back.items():
        wanted = source if name.startswith("source_") else rest
        assert np.array_equal(x, wanted[name]), name
    assert not np.array_equal(
        source["source_input.embedding.table"], rest["source_input.embedding.table"]
    )
    code, out, err = launched("translate", f"--workdir={made['both']}", "hund vogel")
    assert code == 0, err
    code, _, err = launched("evaluate", f"--workdir={made['both']}", "--limit=4")
    assert code == 0, err

    alone = (f"--to={made['more']}", *command)
    assert "together" in refused("export", *alone)
    assert "no run" in refused("export", *alone[:2], "--source_of=nothing", ours[1])
    stranger = (german, "--config.tokenizer.joint=False", f"--workdir={made['stranger']}")
    assert start("train", config("parent"), *SHORT, *stranger) == 0
    said = refused("export", *alone[:2], f"--source_of={made['stranger']}", ours[1])
    assert "nothing in common" in said and str(family["parent"]) in said


@pytest.mark.parametrize("language", [*transfer.LANGUAGES, *transfer.TARGETS])
@pytest.mark.parametrize("trained", transfer.TRAINED)
def test_every_child_has_a_config(language, trained):
    found = transfer.get_config(f"{language},{trained}")
    written = language in transfer.TARGETS
    assert found.data.name == f"libreoffice_help/{language if written else f'{language}-en'}"
    put(found, {"init.from": "runs/parent"})
    check(found)
