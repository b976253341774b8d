"""Cloze questions: what is left out, what it is called, and who is asked about which page."""

import re

import pytest

from crossattn.data import sources
from crossattn.data.errors import DataError
from crossattn.data.sources import cloze
from crossattn.data.sources.libreoffice_help import read_pages, split_of

FRAME = '<div id="DisplayArea">{0}</div>'
PAGE = FRAME.format(
    '<h1 id="hd_id1">Printing</h1>'
    '<p id="par_id1">Choose <span class="menuitem">File - Print</span>,'
    ' then <span class="emph">Options</span>.</p>'
    '<p id="par_id2">The Options button opens a dialog, and <span class="widget">Cancel</span> closes it.</p>'
    '<p id="par_id3">Press <span class="emph">Cancel</span>; <span class="keycode">Esc</span> is a key and'
    ' <span class="emph">not</span> Cancelled. Cancel ends.</p>'
)


@pytest.fixture
def page():
    pages = read_pages(iter([("a.html", PAGE.encode())]), cloze.MarkedParagraphs)
    return {key[1]: own and own.text for key, own in pages.items()}


def asked(page):
    return {each[0]: each[1:] for each in cloze.questions_of("a.html", page)}


def test_terms_are_tagged_words_and_the_same_words_elsewhere(page):
    """Neither keys nor words in lower case are, and no part of a longer word."""
    passage, question, answer = asked(page)["par_id2"]
    numbers = {word for word in passage + question if isinstance(word, int)}
    assert len(numbers) == 3
    options, cancel = (word for word in question if isinstance(word, int))
    assert question == [
        "The",
        options,
        "button",
        "opens",
        "a",
        "dialog,",
        "and",
        cancel,
        "closes",
        "it.",
    ]
    (print_,) = numbers - {options, cancel}
    assert passage == [
        *("Printing", "Choose", print_, ",", "then", options, "."),
        *(
            "Press",
            cancel,
            ";",
            "Esc",
            "is",
            "a",
            "key",
            "and",
            "not",
            "Cancelled.",
            cancel,
            "ends.",
        ),
    ]
    assert answer in (options, cancel)


def test_a_passage_needs_three_terms_and_few_numbers(page):
    """File - Print stands in the first paragraph alone."""
    assert set(asked(page)) == {"par_id2", "par_id3"}
    page["par_id4"] = "File - Print, Options and Cancel."
    assert set(asked(page)) == {"par_id1", "par_id2", "par_id3", "par_id4"}
    page["par_id5"] = "123456789 " * 100
    assert not asked(page)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def pages(*args):
        for index in range(60):
            own = PAGE.replace("dialog", f"dialog of {'x' * index}")
            yield f"p{index}.html", own.encode()
        yield "z.html", PAGE.replace("dialog", "dialog of xx").encode()

    monkeypatch.setattr(
        cloze.fetch, "debian_packages", lambda names, data_dir: [tmp_path / "one.deb"]
    )
    monkeypatch.setattr(cloze.archives, "read_deb", pages)
    cloze._questions.cache_clear()
    yield tmp_path
    cloze._questions.cache_clear()


def test_pages_are_in_one_split_and_each_paragraph_is_asked_once(folder):
    found = {s: sources.open_source("cloze", s, data_dir=folder) for s in sources.SPLITS}
    files = {s: [x["id"].partition("#")[0] for x in own] for s, own in found.items()}
    assert sum(map(len, files.values())) == 60 + 1  # par_id3 is the same in all
    assert "z.html" not in sum(files.values(), [])
    for split, own in files.items():
        assert own and {split_of(file) for file in own} == {split}


def test_names_are_drawn_anew_and_say_nothing(folder):
    once = sources.open_source("cloze", "train", data_dir=folder)
    often = sources.open_source("cloze", "train", data_dir=folder, repeats=5)
    assert len(often) == 5 * len(once) and [often[i] for i in range(len(once))] == list(once)
    assert len({often[i]["id"] for i in range(len(often))}) == len(often)
    own = [often[i] for i in range(0, len(often), len(once))]
    name = re.compile(r"\bent[a-z]\b")
    assert len({x["source"] for x in own}) == 5  # other names,
    assert len({name.sub("N", x["source"]) for x in own}) == 1  # the same words
    for example in own:
        *question, answer = example["target"].split()
        assert question.count(cloze.BLANK) == 1 and answer in example["source"].split()
        assert answer not in question
    test = sources.open_source("cloze", "test", data_dir=folder, repeats=5)
    assert len(test) == len(sources.open_source("cloze", "test", data_dir=folder))


def test_made_up_questions_have_one_answer():
    colours = dict(zip(cloze._ASKED, cloze._COLOURS, strict=True))
    for split in sources.SPLITS:
        found = sources.open_source("cloze/made", split)
        for example in [found[i] for i in range(50)]:
            _, colour, answer = example["target"].split()
            pairs = re.findall(r"(ent.) (\w+)", example["source"])
            assert [name for name, own in pairs if own == colours[colour]] == [answer]
    with pytest.raises(DataError, match="no part 'other'; expected cloze or cloze/made"):
        sources.open_source("cloze/other", "train")
