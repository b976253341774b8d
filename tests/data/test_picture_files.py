"""Tables of the user's own pictures, with labels and captions."""

import json
from pathlib import Path

import numpy as np
import pytest

from crossattn.data import sources
from crossattn.data.errors import DataError
from crossattn.data.features import Image, Label
from crossattn.data.pipeline import feature_eval_batches
from tests.peers import package

pillow = package("PIL.Image", "images")
ROWS = [(f"pictures/{i}.png", "dog" if i % 3 else "cat", f"number {i}") for i in range(40)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    for i, (path, *_) in enumerate(ROWS):
        pillow.fromarray(np.full((3, 3), i, np.uint8)).save(tmp_path / path)
    lines = ["\t".join(row) for row in [("image", "animal", "caption"), *ROWS]]
    (tmp_path / "table.tsv").write_text("\n".join(lines) + "\n")
    records = [dict(zip(("image", "animal", "caption"), row, strict=True)) for row in ROWS]
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
def test_pictures_come_with_what_stands_beside_them(folder, kind):
    name = f"pictures:{folder}/table.{kind}"
    found = {split: list(sources.open_source(name, split)) for split in sources.SPLITS}
    assert {split: len(rows) for split, rows in found.items()} == dict(
        train=36, validation=2, test=2
    )
    classes = sources.classes_of(name)
    assert classes["animal"] == ("cat", "dog") and len(classes["caption"]) == 40
    features = {
        "image": Image(3, 3, 1, mean=(0.0,), std=(1.0,)),
        "animal": Label(classes["animal"]),
    }
    (item,) = feature_eval_batches(found["test"], features, batch_size=2)
    np.testing.assert_allclose(item.batch["image"][:, 0, 0, 0] * 255, [0, 20], atol=1e-3)
    assert item.batch["animal"].tolist() == [0, 1]
    assert [row["caption"] for row in found["test"]] == ["number 0", "number 20"]
    before = sources.identity(name)
    (folder / f"table.{kind}").touch()
    assert sources.identity(name) != before


def test_a_table_a_split(folder):
    for split in sources.SPLITS:
        lines = (folder / "table.jsonl").read_text().splitlines()
        (folder / f"{split}.jsonl").write_text("\n".join(lines[: len(split)]))
    name = f"pictures:{folder}/{{split}}.jsonl"
    assert [len(sources.open_source(name, split)) for split in sources.SPLITS] == [5, 10, 4]


@pytest.mark.parametrize("split_folders", [False, True])
def test_a_folder_a_class(tmp_path, split_folders):
    for split in sources.SPLITS if split_folders else [""]:
        for kind in ("cat", "dog/small"):
            folder = tmp_path / split / kind
            folder.mkdir(parents=True)
            for i in range(20):
                pillow.fromarray(np.full((3, 3), i, np.uint8)).save(folder / f"{i:02}.PNG")
            (folder / "notes.txt").touch()
            (folder / ".hidden.png").touch()
    name = f"pictures:{tmp_path}/{{split}}" if split_folders else f"pictures:{tmp_path}"
    assert sources.classes_of(name) == {"label": ("cat", "dog")}
    found = {split: list(sources.open_source(name, split)) for split in sources.SPLITS}
    sizes = [40, 40, 40] if split_folders else [36, 2, 2]
    assert [len(rows) for rows in found.values()] == sizes
    for rows in found.values():
        assert {row["label"] for row in rows} == {"cat", "dog"}
        assert all(f"/{row['label']}/" in row["image"] for row in rows)
        Image(3, 3).prepare(rows[0]["image"])
    before = sources.identity(name)
    Path(found["train"][0]["image"]).unlink()
    assert sources.identity(name) != before


def test_a_folder_without_pictures_is_refused(tmp_path):
    (tmp_path / "a.png").touch()  # of no class
    with pytest.raises(DataError, match="has too few pictures for a train split"):
        sources.open_source(f"pictures:{tmp_path}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("path\tlabel\na.png\tcat", "line 1: the columns are path, label; expected"),
        ("image\timage\n" + "a\tb\n" * 20, "each once"),
        ("image\tlabel\n" + "a.png\n" * 20, "line 2: 1 column.s., expected 2"),
        ("image\tlabel\n" + "a.png\tcat\n" * 20, "line 2: there is no picture .*a.png"),
        ("image\tlabel\n", "too few pictures for a test split"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, content, said):
    (tmp_path / "table.tsv").write_text(content)
    with pytest.raises(DataError, match=said):
        sources.open_source(f"pictures:{tmp_path}/table.tsv", "test")[0]
