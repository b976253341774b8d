"""Sources by name: synthetic ones, the user's files, TFDS datasets."""

import io
import json
import socket
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image as pillow

from crossattn.data import records, sources, textfiles
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.features import Image

VOWELS = "aeiouéê"


def words(example: dict, side: str) -> list[str]:
    return [example[side][a:b] for a, b in example[f"{side}_spans"]]


def every_phrase() -> list[dict]:
    return [e for split in sources.SPLITS for e in sources.open_source("phrases", split)]


def test_phrases_are_thousands_of_distinct_pairs_in_disjoint_splits():
    texts = [(e["source"], e["target"]) for e in every_phrase()]
    assert len(texts) == len(set(texts)) == 4000
    sizes = [len(sources.open_source("phrases", split)) for split in sources.SPLITS]
    assert sizes[0] > 3000 and min(sizes[1:]) > 300


def test_the_black_cat_crosses():
    example = next(e for e in every_phrase() if e["source"] == "the black cat")
    assert example["target"] == "le chat noir"
    assert example["links"].tolist() == [[0, 0], [1, 2], [2, 1]]


def test_phrases_agree_and_elide():
    for example in every_phrase():
        french = words(example, "target")
        for word, following in zip(french, french[1:], strict=False):
            open_vowel = following[0] in VOWELS or following == "homme"
            if word in ("le", "la", "ma", "ce", "beau"):
                assert not open_vowel, example["target"]
            if word in ("l'", "cet", "vieil", "bel"):
                assert open_vowel, example["target"]
            if word in ("les", "ces", "mes", "deux"):
                assert following.endswith(("s", "x")), example["target"]
            if word in ("la", "une", "cette"):
                assert following not in ("chat", "chien", "petit", "grand", "homme", "oiseau")


def test_every_phrase_word_is_linked_once_on_each_side():
    for example in every_phrase():
        for side, column in (("source", 0), ("target", 1)):
            assert sorted(example["links"][:, column]) == list(range(len(words(example, side))))


def test_reversing_twice_is_nothing():
    there = sources.open_source("phrases", "test")
    back = sources.open_source("phrases/fr-en", "test", reverse=True)
    assert all(
        np.array_equal(there[i][key], back[i][key]) for i in range(len(there)) for key in there[i]
    )


def test_the_copy_task_copies_and_reverses():
    plain = sources.open_source("copy", "test", num_words=8)[5]
    assert plain["source"] == plain["target"]
    turned = sources.open_source("copy", "test", num_words=8, reverse_order=True)[5]
    assert turned["target"].split() == turned["source"].split()[::-1]
    source, target = words(turned, "source"), words(turned, "target")
    assert all(source[i] == target[j] for i, j in turned["links"])


def test_the_copy_task_is_the_same_every_time_and_differs_by_split():
    first, again = sources.open_source("copy"), sources.open_source("copy")
    assert first[17]["source"] == again[17]["source"] == first[17 - len(first)]["source"]
    assert first[17]["source"] != sources.open_source("copy", "test")[17]["source"]


def test_two_texts_are_paired_line_by_line(tmp_path):
    (tmp_path / "a").write_text("".join(f"s {i}\n" for i in range(40)))
    (tmp_path / "b").write_text("".join(f"t {i}\r\n" for i in range(40)))
    train = sources.open_source(f"files:{tmp_path}/a,{tmp_path}/b")
    test = sources.open_source(f"files:{tmp_path}/a,{tmp_path}/b", "test")
    assert len(train) == 36 and [e["source"] for e in test] == ["s 0", "s 20"]
    assert train[0] == {"id": "a:3", "source": "s 2", "target": "t 2"}


def test_a_text_alone_is_its_own_target(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"page {i}\n" for i in range(40)))
    name = f"text:{tmp_path}/a.txt"
    train, test = (sources.open_source(name, split) for split in ("train", "test"))
    assert len(train) == 36
    assert [(e["source"], e["target"]) for e in test] == [("page 0",) * 2, ("page 20",) * 2]
    before = sources.identity(name)
    (tmp_path / "a.txt").write_text("another page\n" * 40)
    assert sources.identity(name) != before
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "one", "body": "two"}))
    name = f"text:{tmp_path}/{{split}}.jsonl"
    for options, text in (({}, "one"), ({"source_column": "body"}, "two")):
        (example,) = sources.open_source(name, **options)
        assert (example["source"], example["target"]) == (text, text)


def test_tables_may_name_their_columns(tmp_path):
    (tmp_path / "train.tsv").write_text("de\tid\ten\nja\t1\tyes\n")
    table = f"files:{tmp_path}/{{split}}.tsv"
    (example,) = sources.open_source(table, source_column="en", target_column="de")
    assert (example["source"], example["target"]) == ("yes", "ja")
    (tmp_path / "train.jsonl").write_text(json.dumps({"en": "yes", "de": "ja"}))
    options = {"source_column": "en", "target_column": "de", "reverse": True}
    (example,) = sources.open_source(f"files:{tmp_path}/{{split}}.jsonl", **options)
    assert (example["source"], example["target"]) == ("ja", "yes")


def test_lines_are_those_of_the_whole_text_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(textfiles, "_CHUNK", 50)  # bytes: chunks end within lines, and characters
    rng = np.random.default_rng(0)
    for count in (1, 63, 64, 65, 128, 400):
        # Only a line feed ends a line, whatever Unicode calls a separator.
        texts = ["ß" * size + "\u2028\x0cx" for size in rng.integers(0, 40, count)]
        ends = (("", "\n", ""), ("\ufeff", "\r\n", "\r\n \n"), ("", "\n", "\n \t\r\n\n"))
        for begin, between, end in ends:
            path = tmp_path / "text"
            path.write_bytes((begin + between.join(texts) + end).encode())
            lines = textfiles.Lines(path)
            assert list(lines) == texts and lines[-1] == texts[-1]
            for i in rng.permutation(count).tolist():
                assert lines[i] == texts[i]


def test_lines_are_dealt_out_once(tmp_path):
    for count in (20, 21, 22, 39, 100):
        path = tmp_path / "table.tsv"
        path.write_text("".join(f"{i}\tx\n" for i in range(count)))
        found = {
            split: [int(e["source"]) for e in sources.open_source(f"files:{path}", split)]
            for split in sources.SPLITS
        }
        assert sorted(sum(found.values(), [])) == list(range(count))
        assert found["test"] == list(range(0, count, 20))
        assert found["validation"] == list(range(1, count, 20))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("x.tsv", b"", "x.tsv, line 1: the file is empty"),
        ("x.tsv", b"a\tb\nc\n", "x.tsv, line 2: 1 column"),
        ("x.tsv", b"a\tb\n\tc\n", "x.tsv, line 2: the source text is empty; take the line out"),
        (
            "x.csv",
            b"a,b\n",
            "x.csv: expected a table with tabs, .tsv, or one record a line, .jsonl",
        ),
        ("x.tsv", b"a\tb\nc\t \n", "x.tsv, line 2: the target text is empty"),
        ("x.tsv", b"a\tb\nc\t\xe9t\xe9\n", "x.tsv, line 2: not UTF-8 .byte 0xE9 at offset 6"),
        ("x.jsonl", b'{"source": "a", "target": "b"}\n{"source": 1}', "x.jsonl, line 2: no text"),
        ("x.jsonl", b"{", "x.jsonl, line 1: not JSON"),
        ("x.jsonl", b"[" * 200_000, "x.jsonl, line 1: nested too deeply"),
        ("x.jsonl", b'{"source": "a", "n": ' + b"[" * 200_000, "line 1: nested too deeply"),
        (
            "x.jsonl",
            b'{"n": ' + b"1" * 9999 + b"}",
            "x.jsonl, line 1: a number of more than 4300 digits",
        ),
        (
            "x.jsonl",
            b'{"source": "a", "target": "\\ud83d!"}',
            r"line 1: the target text has .ud83d, half a",
        ),
        ("x.jsonl", b'["a", "b"]', "x.jsonl, line 1: no text under the key 'source'"),
        ("x.jsonl", b'{"source": ["a"], "target": "b"}', "line 1: no text under the key 'source'"),
        ("x.jsonl", b'{"source": null, "target": "b"}', "line 1: no text under the key 'source'"),
        ("x.jsonl", b"1e999", "line 1: no text under the key 'source'"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        sources.open_source(f"files:{tmp_path}/{name}")


def test_what_is_no_file_is_not_read_for_ever(tmp_path):
    (tmp_path / "test.tsv").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"test\.tsv is no file; expected a file of text"):
        sources.open_source(f"files:{tmp_path}/{{split}}.tsv", "test")


def test_surrogate_pairs_and_braces_in_names_are_read(tmp_path):
    (tmp_path / "{x}test.jsonl").write_text('{"source": "\\ud83d\\ude00", "target": "b"}')
    (example,) = sources.open_source(f"files:{tmp_path}/{{x}}{{split}}.jsonl", "test")
    assert example["source"] == "\U0001f600"


def test_misaligned_texts_name_the_line_without_a_partner(tmp_path):
    (tmp_path / "a").write_text("1\n2\n3\n")
    (tmp_path / "b").write_text("1\n2\n")
    with pytest.raises(DataError, match="a, line 3: no partner"):
        sources.open_source(f"files:{tmp_path}/a,{tmp_path}/b")
    with pytest.raises(DataError, match="missing cannot be read"):
        sources.open_source(f"files:{tmp_path}/a,{tmp_path}/missing")


@pytest.mark.parametrize(
    ("name", "split", "options", "complaint"),
    [
        ("nothing", "train", {}, "there is no data source 'nothing'; expected one of"),
        ("phrases", "dev", {}, "phrases has no split 'dev'"),
        ("phrases/en-it", "train", {}, "no direction 'en-it'"),
        ("libreoffice_help/en-xx", "train", {}, "no direction 'en-xx'"),
        ("libreoffice_help/de-de", "train", {}, "no direction 'de-de'"),
        ("phrasis", "train", {}, r"libreoffice_help, .* \(did you mean phrases\?\)"),
        ("files/a", "train", {}, "there is no data source 'files/a'; expected files:PATH"),
        ("phrases:fr-en", "train", {}, "expected phrases/en-fr or phrases/fr-en"),
        ("copy", "train", {"sizes": 1}, r"sizes was given \(did you mean size\?\)"),
        ("phrases", "train", {"size": 1}, "takes no options; size"),
        ("copy", "train", {"sise": 1}, "sise"),
        ("files:a,b", "train", {"source_column": 2}, "two texts, which have no columns"),
        ("copy", "train", {"min_length": 0}, "lengths are 0 to 12"),
        ("text:a", "train", {"target_column": 2}, "takes source_column; target_column was given"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(name, split, options, complaint):
    with pytest.raises(DataError, match=complaint) as caught:
        sources.open_source(name, split, **options)
    assert "\n" not in str(caught.value)


def test_names_of_columns_are_no_pair_where_they_are_those_of_the_values(tmp_path):
    rows = "".join(f"cat {i}\tchat {i}\n" for i in range(20))
    (tmp_path / "x.tsv").write_text("source\ttarget\n" + rows)
    [first] = sources.open_source(f"files:{tmp_path}/x.tsv", "test")
    assert (first["source"], first["target"]) == ("cat 0", "chat 0")
    turned = sources.open_source(f"files:{tmp_path}/x.tsv", "test", source_column="target")[0]
    assert turned["source"] == "chat 0"
    (tmp_path / "x.tsv").write_text("source\ttarget\ttarget\n" + rows)
    with pytest.raises(DataError, match="two columns are named 'target'; name each once"):
        sources.open_source(f"files:{tmp_path}/x.tsv", "test", target_column="target")


def test_few_lines_are_told_where_lines_go(tmp_path):
    (tmp_path / "x.tsv").write_text("a\tb\n")
    with pytest.raises(
        DataError, match="few lines for a validation split: of 20, the first is test"
    ):
        sources.open_source(f"files:{tmp_path}/x.tsv", "validation")


def test_the_path_of_a_table_is_told_of_its_source(tmp_path):
    (tmp_path / "x.tsv").write_text("a\tb\n")
    with pytest.raises(DataError, match=f"did you mean files:{tmp_path}/x.tsv, text:"):
        sources.open_source(f"{tmp_path}/x.tsv")


def test_every_source_says_what_it_takes():
    names = {path.stem for path in Path(sources.__file__).parent.glob("[a-z]*.py")}
    assert set(sources.known()) == names and "phrases" in names
    for name in sources.known():
        assert sources.form(name).startswith(name)
        assert all(option.meaning.endswith(".") for option in sources.options_of(name).values())


COUNTING = '''"""Numbers and their squares."""

from crossattn.data.sources import Option

FORM = "counting/FROM"
OPTIONS = {"size": Option(int, "How many.", "[1, inf)")}
SPLITS = ("train", "test")


def open_split(start, split, *, data_dir=None, size=10):
    numbers = range(int(start), int(start) + size)
    return [{"id": str(n), "source": str(n), "target": str(n * n)} for n in numbers]
'''


def test_a_file_alone_is_a_source(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setattr(sources, "__path__", [*sources.__path__, str(tmp_path)])
    assert "counting" in sources.known()
    (tmp_path / "my_own").mkdir()
    (tmp_path / "my_own" / "counting.py").write_text(COUNTING)
    (tmp_path / "my_own" / "nothing.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    (example,) = sources.open_source("my_own.counting/7", size=1)
    assert example["target"] == "49"
    with pytest.raises(DataError, match="my_own.missing cannot be imported"):
        sources.open_source("my_own.missing/7")
    with pytest.raises(DataError, match="is no data source: it has no FORM and no open_split"):
        sources.open_source("my_own.nothing")
    found = sources.open_source("counting/3", "test", size=4, reverse=True)
    assert [(e["source"], e["target"]) for e in found] == [
        ("9", "3"),
        ("16", "4"),
        ("25", "5"),
        ("36", "6"),
    ]
    assert sources.identity("counting/3", size=4) != sources.identity("counting/4", size=4)
    with pytest.raises(
        DataError, match=r"counting takes size; sise was given \(did you mean size\?\)"
    ):
        sources.open_source("counting/3", sise=4)
    with pytest.raises(DataError, match="counting/3 has no split 'validation'; it has train, test"):
        sources.open_source("counting/3", "validation")


class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A stand-in for a dataset of TFDS: subclasses have the kinds, the supervised keys and the rows."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos: dict = {}
    KINDS: dict = {}
    KEYS: tuple | None = None

    def _info(self):
        kinds = tfds.features.FeaturesDict(self.KINDS)
        return tfds.core.DatasetInfo(builder=self, features=kinds, supervised_keys=self.KEYS)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield from enumerate(self.rows())


def prepared(builder, tmp_path):
    builder(data_dir=tmp_path / "tfds", file_format="array_record").download_and_prepare()


class TinyTranslation(Tiny, skip_registration=True):
    KINDS = {"de": tfds.features.Text(), "en": tfds.features.Text()}
    KEYS = ("de", "en")

    def rows(self):
        return [{"de": f"Haus {i}", "en": f"house {i}"} for i in range(5)]


def test_a_prepared_tfds_translation_opens_by_name(tmp_path):
    prepared(TinyTranslation, tmp_path)
    source = sources.open_source("tfds:tiny_translation", data_dir=tmp_path)
    assert len(source) == 5 and source[2]["target"] == source[2]["source"].replace("Haus", "house")
    half = sources.open_source("tfds:tiny_translation", "train[:40%]", data_dir=tmp_path)
    assert len(half) == 2
    with pytest.raises(DataError, match="has no split 'test'; it has train"):
        sources.open_source("tfds:tiny_translation", "test", data_dir=tmp_path)


class TinyTexts(Tiny, skip_registration=True):
    """As the corpora of TFDS that name no pair: C4, Wikipedia."""

    KINDS = {name: tfds.features.Text() for name in ("text", "url")}

    def rows(self):
        return [{"text": f"page {i}", "url": "a.b"} for i in range(5)]


def test_a_dataset_of_texts_is_its_own_target(tmp_path):
    prepared(TinyTexts, tmp_path)
    source = sources.open_source("tfds:tiny_texts", data_dir=tmp_path)
    assert len(source) == 5 and source[2]["source"] == source[2]["target"]
    assert {e["source"] for e in source} == {f"page {i}" for i in range(5)}


class TinyPictures(Tiny, skip_registration=True):
    KINDS = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "label": tfds.features.ClassLabel(names=["cat", "dog"]),
        "title": tfds.features.Text(),
        "place": tfds.features.Tensor(shape=(2,), dtype=np.float32),
    }
    KEYS = ("image", "label")

    def rows(self):
        for i in range(4):
            picture = io.BytesIO()
            pillow.fromarray(np.full((3 + i, 4, 3), 40 * i, np.uint8)).save(picture, "png")
            picture.seek(0)
            row = dict(image=picture, label=i % 2, title=f"picture {i}", place=[i, 0.5])
            yield {name: row.get(name, [i]) for name in self.KINDS}


def test_pictures_and_classes_of_tfds_keep_their_names(tmp_path):
    prepared(TinyPictures, tmp_path)
    source = sources.open_source("tfds:tiny_pictures", data_dir=tmp_path)
    classes = sources.classes_of("tfds:tiny_pictures", tmp_path)
    assert classes == {"label": ("cat", "dog")} and len(source) == 4
    for example in source:
        i = int(example["title"].removeprefix("picture "))
        assert example.keys() == {"id", *TinyPictures.KINDS}
        assert example["label"] == ("cat", "dog")[i % 2] and example["place"].tolist() == [i, 0.5]
        pixels = Image(3 + i, 4, resize="exact", mean=(0.0,), std=(1.0,)).prepare(example["image"])
        np.testing.assert_allclose(pixels, 40 * i / 255, rtol=1e-6)


def test_a_kind_of_tfds_that_no_feature_reads_is_named(tmp_path, monkeypatch):
    odd = {
        "image": tfds.features.Image(),
        "boxes": tfds.features.Sequence(tfds.features.Scalar(np.int64)),
    }
    monkeypatch.setattr(TinyPictures, "KINDS", odd)
    prepared(TinyPictures, tmp_path)
    with pytest.raises(DataError, match="holds 'boxes', a Sequence; Image, ClassLabel, Text and"):
        sources.open_source("tfds:tiny_pictures", data_dir=tmp_path)


def test_a_dataset_whose_files_nobody_serves_is_refused_at_once(tmp_path, monkeypatch):
    with socket.socket() as taken:  # where no server listens
        taken.bind(("localhost", 0))
        url = f"http://localhost:{taken.getsockname()[1]}/a.zip"
        monkeypatch.setattr(TinyPictures, "url_infos", {url: None})
        builder = TinyPictures(data_dir=tmp_path / "tfds", file_format="array_record")
        with pytest.raises(
            DataUnavailable, match=r"\(ConnectionError: localhost cannot be reached\)"
        ):
            records.prepare(builder, "tfds:tiny_pictures", tmp_path)


def test_a_process_that_asked_before_another_prepared_the_data_reads_it(tmp_path):
    first, second = (
        TinyPictures(data_dir=tmp_path / "tfds", file_format="array_record") for _ in range(2)
    )
    for builder in (first, second):
        records.prepare(builder, "tfds:tiny_pictures", tmp_path)
        assert len(builder.as_data_source(split="train")) == 4


def test_an_unknown_tfds_dataset_is_refused_in_one_line(tmp_path):
    with pytest.raises(DataUnavailable, match="tfds:no_such_set") as caught:
        sources.open_source("tfds:no_such_set", data_dir=tmp_path)
    assert "\n" not in str(caught.value)
