"""Pages laid out with their regions: what a region is, where it stands, its picture and its text."""

import io

import numpy as np
import pytest

from crossattn.data import pipeline, sources
from crossattn.data.errors import DataError, DataUnavailable
from crossattn.data.features import Boxes, Crops, Label, Texts
from crossattn.data.sources import help_pages, libreoffice_help
from crossattn.data.sources.help_pages import Block, lay_out, pages_of, read_blocks, style_of
from crossattn.data.tokenizers import EOS, train_tokenizer
from tests.peers import package

from .conftest import help_pages as help_files
from .conftest import write_deb

package("pymupdf", "pages")
pillow = package("PIL.Image", "pages")

CLASSES = help_pages.CLASSES["label"]
BODY = """<div id="DisplayArea"><h1 id="hd_1">Moving <span class="productname">Writer</span> cells</h1>
<p class="paragraph">Press <span class="keycode">F2</span> &lt;now&gt;.</p><p><img src="x.svg"></p>
<ol><li><p>Choose <span class="emph">File</span>.</p></li><li><p>Two.</p><p>Three.</p></li></ol>
<div class="note"><div class="notetext"><p>Beware.</p><p>Or not.</p></div></div>
<table><tr><th><p>Name</p></th><th><p>Use</p></th></tr><tr><td>a</td><td>b</td></tr></table>
<p>Hold <span class="switchinline"><span class="MAC">Command</span><span>Ctrl</span></span>+C</p>
<div class="bascode"><pre>Sub Main</pre></div><footer><h3>debug</h3></footer>"""


def test_blocks_are_what_the_tags_of_a_page_say():
    found = [(block.kind, block.text) for block in read_blocks(BODY)]
    assert found == [
        ("title", "Moving Writer cells"),
        ("paragraph", "Press F2 <now>."),
        ("step", "Choose File."),
        ("step", "Two. Three."),
        ("note", "Beware. Or not."),
        ("table", "Name Use"),
        ("table", "a b"),
        ("paragraph", "Hold Ctrl+C"),
    ]
    marked = {block.text: block.markup.strip() for block in read_blocks(BODY)}
    assert marked["Press F2 <now>."] == "Press <b>F2</b> &lt;now&gt;."
    assert marked["a b"] == "<td>a</td><td>b</td>"


def ink(page, box):
    """How much of a box of a page is not white."""
    picture = np.asarray(pillow.open(io.BytesIO(page)).convert("L"), float)
    left, top, right, bottom = np.rint(box).astype(int)
    return (255 - picture[top:bottom, left:right]).mean()


def test_a_box_holds_its_ink_in_every_style_and_boxes_follow_one_another():
    blocks = read_blocks(BODY)
    for name in range(12):
        ((page, boxes),) = lay_out(blocks, style_of(f"page {name}"))
        assert list(boxes) == list(range(len(blocks)))
        tops = [box[1] for box in boxes.values()]
        assert tops == sorted(tops) and all(ink(page, box) > 0 for box in boxes.values())
        below = max(box[3] for box in boxes.values()) + 12
        assert ink(page, (0, below, *help_pages.SIZE)) == 0


def test_the_same_page_is_laid_out_byte_for_byte():
    one, other = (list(lay_out(read_blocks(BODY), style_of("a"))) for _ in range(2))
    assert one == other and one != list(lay_out(read_blocks(BODY), style_of("b")))


def test_what_a_page_breaks_is_no_region_and_a_file_has_three_pages_at_most():
    long = [Block("paragraph", "p", f"{i}", f"{i} word" * 150) for i in range(40)]
    pages = list(pages_of("long.html", long))
    texts = [page["texts"].split("\n") for page in pages]
    assert len(pages) == 3 and [page["id"][-2:] for page in pages] == ["#0", "#1", "#2"]
    kept = [int(text) for page in texts for text in page]
    assert kept == [0, 1, 3, 4, 6]  # two and a half fit on a page
    assert not list(pages_of("empty.html", [])) and not list(pages_of("x", read_blocks("<p></p>")))


@pytest.fixture
def help_package(tmp_path):
    """A data folder with a help package of 60 pages, one without anything to lay out."""
    pages = {f"swriter/page{i}.html": f"<h1>Page {i}</h1><p>Said {i}.</p>" for i in range(60)}
    path = tmp_path / "downloads" / "libreoffice-help-en-us_1-1_all.deb"
    write_deb(path, help_files("en-US", pages | {"swriter/empty.html": "<br>"}))
    return tmp_path


def test_pages_come_with_their_regions_in_the_split_of_their_file(help_package):
    found = {}
    for split in sources.SPLITS:
        for page in sources.open_source("help_pages", split, data_dir=help_package):
            assert libreoffice_help.split_of(page["id"].split("#")[0]) == split
            found[page["id"]] = page
    assert len(found) == 60
    page = found["swriter/page7.html#0"]
    assert page["text"] == ["Page 7", "Said 7."] and page["label"] == ["title", "paragraph"]
    assert page["boxes"]["boxes"].shape == (2, 4) and page["boxes"]["size"] == help_pages.SIZE
    assert pillow.open(io.BytesIO(page["pictures"]["page"])).size == help_pages.SIZE


def test_the_number_of_pages_is_an_option():
    every = sources.open_source("help_pages/made")
    few = sources.open_source("help_pages/made", pages=5)
    assert [page["id"] for page in few] == [every[i]["id"] for i in range(5)]
    assert len(sources.open_source("help_pages/made", pages=10**6)) == len(every) >= 60


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("help_pages/fr", {}, "has no part 'fr'; expected help_pages or help_pages/made"),
        ("help_pages/made", {"pages": -1}, "pages is -1; expected 0, which is all, or more"),
        ("help_pages/made", {"page": 1}, "page was given .did you mean pages"),
    ],
)
def test_wrong_names_and_options_are_one_line(name, options, said):
    with pytest.raises(DataError, match=said):
        sources.open_source(name, **options)


def test_a_package_without_pages_is_named(tmp_path):
    path = tmp_path / "downloads" / "libreoffice-help-en-us_1-1_all.deb"
    write_deb(path, {"usr/share/x": "nothing"})
    with pytest.raises(
        DataUnavailable, match="put libreoffice-help-en-us_.*has no pages"
    ) as caught:
        sources.open_source("help_pages", data_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_made_up_page_is_told_by_the_words_of_its_title_and_the_looks_of_its_blocks():
    """Classes of the same look are two, one for each convention."""
    classes, begins = {}, set()
    for split in sources.SPLITS:
        for page in sources.open_source("help_pages/made", split):
            title = page["text"][0].split()[0]
            begins.add(title)
            png = pillow.open(io.BytesIO(page["pictures"]["page"]))
            for label, box in zip(page["label"][1:], page["boxes"]["boxes"][1:], strict=True):
                pixels = np.asarray(png)[
                    int(box[1]) + 1 : int(box[3]) - 1, int(box[0]) + 1 : int(box[2])
                ]
                left = pixels[:, :12].min()
                look = "grey" if np.median(pixels) < 255 else "right" if left == 255 else "left"
                classes.setdefault((look, title in ("About", "Notes")), set()).add(label)
    assert begins == {"About", "Notes", "Using", "Working"}
    assert classes["grey", False] == {"table"} == classes["right", True]
    assert classes["grey", True] == {"note"} == classes["right", False]
    assert classes["left", False] == {"step", "paragraph"} == classes["left", True]


def test_made_up_pages_of_the_splits_differ_and_have_every_class():
    seen = {split: sources.open_source("help_pages/made", split) for split in sources.SPLITS}
    pictures = [page["pictures"]["page"] for pages in seen.values() for page in pages]
    assert len(set(pictures)) == len(pictures)
    assert {label for page in seen["train"] for label in page["label"]} == set(CLASSES)
    texts = [" ".join(page["text"]) for pages in seen.values() for page in pages]
    assert len(set(texts)) == len(texts)


# The features of regions.

TOKENIZER = train_tokenizer(["the cat", "a dog and the cat"], 300)
SQUARE = np.zeros((10, 20), np.uint8)
SQUARE[2:4, 5:10] = 255  # white on black


def crops(**options):
    return Crops(**{"height": 2, "width": 5, **options})


def test_texts_are_rows_of_tokens_cut_to_the_longest():
    feature = Texts(TOKENIZER, tokens=3, max_length=3)
    rows = feature.prepare(["the cat", "", "a dog and the cat", "one too many"])
    assert rows.shape == (3, 3) and rows[1].tolist() == [EOS, 0, 0]
    ids = TOKENIZER.encode("a dog and the cat")
    assert rows[2].tolist() == [*ids[:2], EOS]
    assert feature.lengths([["a"], [], ["a"] * 4]).tolist() == [1, 0, 4]
    for wrong, said in (
        ("a text", "str came; expected a sequence"),
        ([1], "int is among the texts"),
    ):
        with pytest.raises(DataError, match=said):
            feature.prepare(wrong)


def test_a_crop_is_the_pixels_of_its_box():
    value = {"page": SQUARE, "boxes": [[25, 20, 50, 40], [0, 0, 100, 100]], "size": (100, 100)}
    found = crops().prepare(value)
    assert found.shape == (2, 2, 5, 1) and (found[0] == 1).all() and found[1].min() < 0
    around = crops(margin=500.0).prepare(value)
    assert around.mean() > 0.9  # far past the page, which is white there


def test_a_page_without_a_picture_or_a_wrong_margin_is_refused():
    with pytest.raises(DataError, match="there is no picture of the page"):
        crops().prepare({"boxes": [[0, 0, 1, 1]], "size": (1, 1)})
    with pytest.raises(DataError, match="margin is -1.0; expected 0 or more"):
        crops(margin=-1.0)
    with pytest.raises(DataError, match="box 0, 5, 5, 5, 9, has no area"):
        crops().prepare({"page": SQUARE, "boxes": [[5, 5, 5, 9]], "size": (100, 100)})
    with pytest.raises(DataError, match="cannot be read|is no image"):
        crops().prepare({"page": b"junk", "boxes": [[0, 0, 1, 1]], "size": (1, 1)})


def test_pages_are_batched_also_those_without_regions():
    empty = {"boxes": np.zeros((0, 4)), "size": help_pages.SIZE}
    pages = [*sources.open_source("help_pages/made", "test", pages=5)]
    pages.append({"id": "empty", "text": [], "label": [], "boxes": empty})
    pages[-1]["pictures"] = {"page": pages[0]["pictures"]["page"]} | empty
    features = {
        "text": Texts(TOKENIZER, 6, 12), "boxes": Boxes(12), "label": Label(CLASSES, 12),
        "pictures": Crops(8, 16, margin=4.0, max_length=12),
    }  # fmt: skip
    seen = 0
    for item in pipeline.feature_eval_batches(pages, features, batch_size=2):
        batch = item.batch
        there = batch["label_segment_ids"] > 0
        for name in ("text", "boxes", "pictures"):
            np.testing.assert_array_equal(batch[f"{name}_segment_ids"] > 0, there)
            assert not batch[name][~there].any()
        for row, index in enumerate(item.indices):
            if index >= 0:
                seen += 1
                labels = [CLASSES[i] for i in batch["label"][row][there[row]]]
                assert labels == pages[index]["label"]
    assert seen == 6
