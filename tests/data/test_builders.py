"""The two real datasets, on miniature packages."""

from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from crossattn.data import sources
from crossattn.data.errors import DataError
from crossattn.data.sources import greek_english, libreoffice_help
from crossattn.data.tags import Tagged
from tests.data.conftest import help_pages, write_deb


def paragraphs(body: str) -> dict[str, str | None]:
    pages = libreoffice_help.read_pages(iter([("a.html", body.encode())]))
    return {paragraph: own and own.text for (_, paragraph), own in pages.items()}


def test_help_text_loses_tags_entities_and_extra_space():
    keys = '<span class="keycode">A &amp; B</span>'
    body = f'<p id="par_id1" class="x">Press&nbsp;{keys},\n  then<br>stop</p>'
    assert paragraphs(body) == {"par_id1": "Press A & B, then stop"}


def test_help_takes_headings_and_paragraphs_with_ids_only():
    body = '<h2 id="hd_id1">Head</h2><p>none</p><p id="bm_x">no</p><p id="par_id2"></p>'
    assert paragraphs(body) == {"hd_id1": "Head"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('<span class="MAC">Command</span><span>Ctrl</span>', None),
        ('<span class="MAC"><span>Cmd</span></span>\n<span><a href="x">Ctrl</a></span>', None),
        ('<span class="WRITER">Writer only</span>', "Press Writer only+C"),
        ('<span class="MAC"></span><span>Ctrl</span>', "Press Ctrl+C"),
    ],
)
def test_help_marks_paragraphs_that_join_variants_of_a_wording(body, text):
    page = f'<p id="par_id1">Press <span class="switchinline">{body}</span>+C</p>'
    assert paragraphs(page) == {"par_id1": text}


def test_help_pairs_have_one_target_a_source_and_none_untranslated():
    key = [("a.html", f"par_{i}") for i in range(5)]
    source, target = (
        {name: text and Tagged(text) for name, text in zip(key, texts, strict=True)}
        for texts in (
            ["Save", "Save", "Open", "Same", None],
            ["Enregistrer", "Sauver", "Ouvrir", "Same", "Joint"],
        )
    )
    pairs = libreoffice_help.join_pages(source, target)
    texts = [(own.text, other.text) for _, _, own, other in pairs]
    assert texts == [("Save", "Enregistrer"), ("Open", "Ouvrir")]


def test_help_is_read_back_whole_with_every_page_in_one_split(help_packages):
    found = {}
    for split in sources.SPLITS:
        source = sources.open_source("libreoffice_help/en-fr", split, data_dir=help_packages)
        for example in source:
            page = example["id"].split("#")[0]
            assert libreoffice_help.split_of(page) == split
            assert example["family"] == page
            found[page] = example
    assert len(found) == 60
    example = found["swriter/page7.html"]
    assert example["source"] == "Click OK number 7."
    assert example["target"] == "Cliquez sur OK numéro 7."


def test_a_page_is_in_one_split_whatever_the_language(help_packages):
    spanish = {
        f"swriter/page{i}.html": f'<p id="par_id{i}">Pulse OK número {i}.</p>' for i in range(60)
    }
    package = help_packages / "downloads" / "libreoffice-help-es_1-1_all.deb"
    write_deb(package, help_pages("es", spanish))
    pages = {
        (language, split): {
            example["id"].split("#")[0]
            for example in sources.open_source(
                f"libreoffice_help/{language}-en", split, data_dir=help_packages
            )
        }
        for language in ("fr", "es")
        for split in sources.SPLITS
    }
    assert all(pages["fr", split] == pages["es", split] != set() for split in sources.SPLITS)
    assert not pages["es", "test"] & (pages["fr", "train"] | pages["fr", "validation"])
    for direction, order in (("fr-es", 1), ("es-fr", -1)):  # two languages that are not English
        example = sources.open_source(f"libreoffice_help/{direction}", data_dir=help_packages)[0]
        number = example["family"].removeprefix("swriter/page").removesuffix(".html")
        texts = [f"Cliquez sur OK numéro {number}.", f"Pulse OK número {number}."][::order]
        assert [example["source"], example["target"]] == texts


def test_help_can_be_read_the_other_way_round(help_packages):
    there = sources.open_source("libreoffice_help/en-fr", data_dir=help_packages)[0]
    back = sources.open_source("libreoffice_help/fr-en", data_dir=help_packages)[0]
    assert (back["source"], back["target"]) == (there["target"], there["source"])
    assert back["family"] == there["family"]


@pytest.mark.parametrize(("split", "option"), [("train", "pairs"), ("test", "held_out")])
def test_pairs_of_the_help_may_be_fewer_at_equal_distances(help_packages, split, option):
    def ids(split: str, **options: Any) -> list[str]:
        name = "libreoffice_help/en-fr"
        found = sources.open_source(name, split, data_dir=help_packages, **options)
        return [example["id"] for example in found]

    whole, few = ids(split), ids(split, **{option: 2})
    assert len(whole) > 2 and few == [whole[0], whole[len(whole) // 2]]
    other = "validation" if split == "train" else "train"
    assert ids(other, **{option: 2}) == ids(other)
    with pytest.raises(
        DataError, match=f"{option} is 5000; the {split} split .* {len(whole)} pairs"
    ):
        ids(split, **{option: 5000})


def test_prepared_help_opens_through_tfds_itself(help_packages):
    sources.open_source("libreoffice_help/en-fr", data_dir=help_packages)
    folder = help_packages / "tfds" / "libreoffice_help" / "en-fr" / "1.1.0"
    rows = tfds.builder_from_directory(folder).as_data_source(split="train")
    assert rows[0]["en"].decode().startswith("Click OK")


def test_greek_splits_by_verse_order(greek_wheel):
    ids = {
        split: [e["id"] for e in sources.open_source("greek_english", split, data_dir=greek_wheel)]
        for split in sources.SPLITS
    }
    assert ids["test"] == ["40001001", "40001021"]
    assert ids["validation"] == ["40001002", "40001022"]
    assert len(ids["train"]) == 36
    for backward in ("greek_english", "greek_english/en-el"):
        verse = sources.open_source(backward, "test", data_dir=greek_wheel)[0]
        assert verse["family"] == "40001" and verse["id"].startswith("40001")


def test_greek_spans_and_links_point_at_the_words(greek_wheel):
    example = sources.open_source("greek_english", "test", data_dir=greek_wheel)[0]
    assert example["target"] == "The word was God’s."
    source = [example["source"][a:b] for a, b in example["source_spans"]]
    target = [example["target"][a:b] for a, b in example["target_spans"]]
    linked = [(source[i], target[j]) for i, j in example["links"]]
    assert linked == [("λόγος", "The"), ("λόγος", "word"), ("ἦν", "was"), ("θεοῦ", "God’s")]
    assert target[-1] == "." and 4 not in example["links"][:, 1]


def test_greek_reversed_has_reversed_links(greek_wheel):
    there = sources.open_source("greek_english/el-en", "test", data_dir=greek_wheel)[0]
    back = sources.open_source("greek_english/en-el", "test", data_dir=greek_wheel)[0]
    assert {tuple(link) for link in back["links"]} == {(j, i) for i, j in there["links"]}
    assert np.array_equal(back["source_spans"], there["target_spans"])


def test_greek_text_is_composed():
    rows = [{"text": "ε\u0313ν"}, {"text": "ἀρχῇ", "skip_space_after": ""}]
    text, spans = greek_english.detokenise(rows)
    assert text == "ἐν ἀρχῇ" and spans.tolist() == [[0, 2], [3, 7]]
