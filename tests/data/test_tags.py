"""Phrases that translators tagged alike, and the tags of the help's paragraphs."""

import numpy as np
import pytest

from crossattn.data import sources
from crossattn.data.sources import libreoffice_help
from crossattn.data.tags import Tag, Tagged, glossary, phrases
from tests.data.conftest import help_pages, write_deb


def tagged(marked: str) -> Tagged:
    """A text with [kind:content] for a tag."""
    text, tags = "", []
    for part in marked.replace("]", "[").split("["):
        kind, colon, content = part.partition(":")
        start, text = len(text), text + (content if colon else part)
        if colon:
            tags.append(Tag(kind, start, len(text)))
    return Tagged(text, tuple(tags))


def linked(source: str, target: str, *known: tuple[str, str]) -> list[tuple[str, str]]:
    own, other = tagged(source), tagged(target)
    words = glossary((tagged(s), tagged(t)) for s, t in known)
    found = phrases(own, other, words)
    return [(own.text[s.start : s.end], other.text[t.start : t.end]) for s, t in found]


def test_one_tag_of_a_kind_on_each_side_is_a_phrase():
    found = linked("press [key:F1] in [emph:Save]", "[emph:Sauver] par [key:F1]")
    assert found == [("F1", "F1"), ("Save", "Sauver")]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a [emph:Save]", "un Sauver"),
        ("a [emph:Save]", "un [input:Sauver]"),
        ("a [emph:Save]", "un [emph:Sau] [emph:ver]"),
        ("a [emph:Save] or [emph:Open]", "un [emph:Sauver] ou [emph:Ouvrir]"),
        ("a [emph:OK] or [emph:OK] or [emph:No]", "[emph:OK], [emph:OK], [emph:Non]"),
        ("[emph:Save]", "[emph:Sauver]"),  # around the whole of both
    ],
)
def test_what_leaves_a_choice_or_says_nothing_is_left_out(source, target):
    assert linked(source, target) == []


def test_tags_of_one_kind_are_linked_by_content_whatever_their_order():
    found = linked("[emph:A4] of [emph:Size]", "[emph:Taille] = [emph:a4]")
    assert found == [("A4", "a4"), ("Size", "Taille")]
    both = "the [emph:Open] then [emph:Save] bar", "[emph:Sauver] puis [emph:Ouvrir]"
    assert linked(*both) == []
    assert linked(*both, ("so [emph:save]", "[emph:sauver]")) == [
        ("Open", "Ouvrir"),
        ("Save", "Sauver"),
    ]
    # Both contents may stand for it, so the glossary does not tell.
    twice = ("so [emph:save]", "[emph:sauver]"), ("so [emph:save]", "[emph:ouvrir]")
    assert linked(*both, *twice) == []


def tags_of(body: str) -> list[tuple[str, str]]:
    pages = libreoffice_help.read_pages(iter([("a.html", f'<p id="par_1">{body}</p>'.encode())]))
    own = pages["a.html", "par_1"]
    return [] if own is None else [(tag.kind, own.text[tag.start : tag.end]) for tag in own.tags]


def test_tags_of_a_paragraph_lie_around_their_words_whatever_the_white_space():
    body = (
        'Press\n <span class="keycode"> Ctrl\u00ad+&amp;\n C </span>, e\u0301t'
        '<span class="emph">e\u0301 <span class="avis">x<span class="widget">OK</span></span></span>'
        '<span class="emph"> \u200b</span>'
    )
    assert tags_of(body) == [("keycode", "Ctrl+& C"), ("emph", "\u00e9 xOK"), ("widget", "OK")]


def test_a_paragraph_that_joins_variants_has_no_tags():
    both = '<span class="switchinline"><span>Cmd</span><span class="emph">Ctrl</span></span>'
    assert tags_of(both) == []


@pytest.mark.parametrize("direction", ["en-fr", "fr-en"])
def test_examples_have_their_phrases_in_either_direction(tmp_path, direction):
    bodies = {
        "en-US": 'The <span class="emph">View</span> {} <span class="input">9</span>',
        "fr": '<span class="input">9</span> {} <span class="emph">Affichage</span>',
    }
    for language, body in bodies.items():
        pages = {f"a{i}.html": f'<p id="par_{i}">{body.format(i)}</p>' for i in range(40)}
        name = f"libreoffice-help-{language.lower()}_1-1_all.deb"
        write_deb(tmp_path / "downloads" / name, help_pages(language, pages))
    example = sources.open_source(f"libreoffice_help/{direction}", data_dir=tmp_path)[0]
    assert example["kinds"] == ["emph", "input"] and example["phrases"].dtype == np.int32
    words = [(example["source"][a:b], example["target"][c:d]) for a, b, c, d in example["phrases"]]
    expected = [("View", "Affichage"), ("9", "9")]
    assert words == (expected if direction == "en-fr" else [pair[::-1] for pair in expected])
