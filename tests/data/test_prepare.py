"""Prepared corpora: the batches of one in memory, the same bytes however they came about, or none."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossattn.data import pipeline, prepare, prepared, sources, textfiles, tokenizers
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.pairs import pair_examples, pair_features

from .batches import same, take

ROOT = Path(__file__).parents[2]
SHAPE = {"batch_size": 8}
LIMITS = {"source_len": 24, "target_len": 28}
SHARD, SIZE = 128, 900

# As the command line has it, but with small shards; stdin is the corpus.
PREPARE = f"""
import pickle, sys
from crossattn.data import prepare
prepare._SHARD = {SHARD}
prepare.prepare(pickle.load(sys.stdin.buffer), workers=2)
"""


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(prepare, "_SHARD", SHARD)


@pytest.fixture(scope="module")
def pairs():
    return sources.open_source("copy", "train", size=SIZE)


@pytest.fixture(scope="module")
def tokenizer(pairs):
    return tokenizers.train_tokenizer([p[s] for p in pairs for s in ("source", "target")], 300)


@pytest.fixture
def corpus(tokenizer, tmp_path):
    """A function that makes one of the copy task, or of what is given."""

    def make(folder="data", name="copy", size=SIZE, truncation="drop", **options):
        opening = {"data_dir": str(tmp_path / folder)} | ({"size": size} if name == "copy" else {})
        return prepare.PreparedCorpus(
            name,
            pair_features(**({"tokenizer": tokenizer} | LIMITS | options)),
            opening,
            truncation=truncation,
            side=options.get("side", "both"),
        )

    return make


def in_memory(corpus, source):
    """The same corpus, prepared without a file."""
    examples = pair_examples(source, corpus.side, "links" in corpus.features)
    return prepared.prepare_examples(examples, corpus.features, corpus.truncation)


def started(corpus):
    """Another process that prepares it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARE], stdin=subprocess.PIPE, env=environment
    )
    process.stdin.write(pickle.dumps(corpus))
    process.stdin.close()
    return process


def contents(folder):
    files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("mode", "options", "share"),
    [
        ("pack", {}, 0.0),
        ("bucket", {}, 0.0),
        ("pack", {}, 1.0),
        ("bucket", {"source_len": 16, "truncation": "cut"}, 0.3),
        ("pack", {"side": "source"}, 0.0),
    ],
)
def test_batches_are_those_of_the_corpus_in_memory(corpus, pairs, mode, options, share):
    given = corpus(links=share > 0, **options)
    prepare.prepare(given, workers=1)
    found = prepare.open_prepared(given), in_memory(given, pairs)
    on_disk, held = (each.with_links(share, seed=5) if share else each for each in found)
    assert len(on_disk) == len(held) and on_disk.dropped == held.dropped
    assert on_disk.fingerprint() == held.fingerprint()
    shape = SHAPE | {"mode": mode, "seed": 5}
    first = pipeline.train_batches(held, **shape)
    take(first, 7)
    second = pipeline.train_batches(on_disk, **shape)
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert same(take(first, 40), take(second, 40))
    assert first.get_state() == second.get_state()
    assert len(json.dumps(second.get_state())) < 200


def test_files_do_not_depend_on_the_number_of_processes(corpus):
    folders = [
        prepare.prepare(corpus(f"with-{workers}", links=True), workers) for workers in (1, 2)
    ]
    assert contents(folders[0]) == contents(folders[1])


@pytest.mark.slow
def test_killed_and_started_again_it_keeps_what_is_whole_and_ends_with_the_same_files(corpus):
    given = corpus("killed", size=4000)
    process = started(given)
    while len(list(given.folder.glob("index-*"))) < 3 and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    finished = {path.name: path.stat().st_mtime_ns for path in given.folder.glob("index-*")}
    assert 3 <= len(finished) < 32 and not prepare.is_prepared(given)
    with pytest.raises(DataUnavailable, match="there is no prepared corpus"):
        prepare.open_prepared(given)
    folder = prepare.prepare(given, workers=1)
    assert (
        finished.items()
        <= {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}.items()
    )
    never_killed = prepare.prepare(corpus("never-killed", size=4000), workers=1)
    assert contents(folder) == contents(never_killed)
    assert not list(folder.glob(".*"))


def test_two_that_prepare_at_once_leave_one_whole_corpus(corpus):
    given = corpus("both")
    both = [started(given) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert prepare.is_prepared(given)
    assert contents(given.folder) == contents(prepare.prepare(corpus("alone"), workers=1))


@pytest.mark.parametrize("name", ["numbers-00001-of-00008", "index-00001-of-00008", "starts.npy"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_corpus_that_lost_something_is_none_and_is_mended(corpus, name, damage, caplog):
    given = corpus()
    folder = prepare.prepare(given, workers=1)
    before = contents(folder)
    if damage == "cut":
        os.truncate(folder / name, 10)
    else:
        (folder / name).unlink()
    assert not prepare.is_prepared(given)
    assert prepare.prepare(given, workers=1) == folder
    assert f"has lost {name}" in caplog.text and contents(folder) == before


def test_other_data_tokenizers_or_options_lie_elsewhere(corpus, pairs, tmp_path):
    table = tmp_path / "train.tsv"
    table.write_text("a\tb\n" * 30)
    name = f"files:{tmp_path}/{{split}}.tsv"
    other = tokenizers.train_tokenizer([p["source"] for p in pairs], 280)
    found = [
        corpus(),
        corpus(name="phrases"),
        corpus(source_len=20),
        corpus(size=800),
        corpus(truncation="cut"),
        corpus(side="target"),
        corpus(links=True),
        corpus(target_tokenizer=other),
        corpus(name=name),
    ]
    folders = [each.folder for each in found]
    table.write_text("a\tc\n" * 30)
    os.utime(table, ns=(1, 1))
    folders.append(corpus(name=name).folder)
    assert len(set(folders)) == len(folders)
    assert corpus().folder == folders[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_of_a_large_file_is_named(corpus, tmp_path, monkeypatch, workers):
    lines = ["a\tb\n"] * 10_000  # so many that the check of annotations, which reads one, misses it
    lines[300] = "a\n"
    (tmp_path / "train.tsv").write_text("".join(lines))
    # Opened, so large a file is not looked at whole; other processes have their own limit.
    monkeypatch.setattr(textfiles, "_CHECKED", 0)
    given = corpus(name=f"files:{tmp_path}/{{split}}.tsv")
    with pytest.raises(DataError, match="train.tsv, line 301: 1 column"):
        prepare.prepare(given, workers)
    assert not prepare.is_prepared(given)


def test_a_process_that_dies_is_told_of_in_one_line(corpus, monkeypatch):
    monkeypatch.setattr(prepare, "_write_shard_of", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataUnavailable, match="ended by itself .was there too little memory") as e:
        prepare.prepare(corpus(), workers=2)
    assert "\n" not in str(e.value) and "start again to go on" in str(e.value)


def test_processes_that_prepare_import_no_jax(corpus, monkeypatch, tmp_path):
    write, folder = prepare._write_shard_of, str(tmp_path)

    def looked(corpus, shard, indices):  # pickled by value, so that a process imports no test
        done = write(corpus, shard, indices)
        with open("/proc/self/maps") as maps, open(f"{folder}/{shard}.maps", "w") as copy:
            copy.write(maps.read())
        return done

    monkeypatch.setattr(prepare, "_write_shard_of", looked)
    prepare.prepare(corpus(), workers=2)
    loaded = [path.read_text() for path in tmp_path.glob("*.maps")]
    assert len(loaded) == -(-SIZE // SHARD)
    assert all("numpy" in each and "jaxlib" not in each for each in loaded)


def test_nothing_short_enough_is_refused_every_time(corpus):
    given = corpus(source_len=2, target_len=2)
    prepare.prepare(given, workers=1)
    for _ in range(2):
        with pytest.raises(DataError, match="no example is short enough: dropped 900 of 900"):
            prepare.open_prepared(given)


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataUnavailable, match="file/prepared.* cannot be written: Not a directory"):
        prepare.prepare(corpus("file"), workers=1)


def test_a_file_that_is_cut_while_training_is_refused(corpus):
    given = corpus()
    folder = prepare.prepare(given, workers=1)
    iterator = pipeline.train_batches(prepare.open_prepared(given), prefetch=0, **SHAPE)
    next(iterator)
    for path in folder.glob("numbers-0*"):
        os.truncate(path, 0)
    with pytest.raises(DataUnavailable, match="numbers-.* cannot be read .it is cut short"):
        take(iterator, 50)
