"""Markup that follows its words: nesting, nothing lost, and placing by known attention."""

import html
import itertools
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossattn.decode import markup


def spans_of(text: str) -> np.ndarray:
    """The spans of words and of single marks."""
    return np.array([m.span() for m in re.finditer(r"\w+|[^\w\s]", text)], int).reshape(-1, 2)


def carried(source: str, translation: str, links: list[tuple[int, int]]) -> str:
    """The translation with the source's markup; links are (source word, target word)."""
    marked = markup.read(source)
    own, other = spans_of(marked.text), spans_of(translation)
    weights = np.zeros((len(other), len(own)))
    for s, t in links:
        weights[t, s] = 1.0
    spans = markup.place(marked, translation, weights, own, other)
    return markup.write(marked, translation, spans)


@pytest.mark.parametrize(
    ("source", "translation", "links", "expected"),
    [
        (  # words that change places take their tags along
            "the <i>black</i> <b class='x'>cat</b>",
            "le chat noir",
            [(0, 0), (1, 2), (2, 1)],
            "le <b class='x'>chat</b> <i>noir</i>",
        ),
        (  # one word becomes three, and the mark after it stays outside
            "press <kbd>Enter</kbd>.",
            "appuyez sur la touche.",
            [(0, 0), (1, 1), (1, 2), (1, 3), (1, 4)],
            "appuyez <kbd>sur la touche</kbd>.",
        ),
        (  # a word inside the run that attends elsewhere does not split it
            "<b>one two three</b> four",
            "un et deux trois quatre",
            [(0, 0), (3, 1), (1, 2), (2, 3), (3, 4)],
            "<b>un et deux trois</b> quatre",
        ),
        (  # nested, exchanged inside the parent
            "<p>a <b>c <i>d</i></b></p>",
            "D C A",
            [(0, 2), (1, 1), (2, 0)],
            "<p><b><i>D</i> C</b> A</p>",
        ),
        (  # without words: between what its neighbours became, or at the end of its parent
            "one<br/>two <b>three<img src='a>b'></b>",
            "deux un trois",
            [(0, 1), (1, 0), (2, 2)],
            "<br/>deux un <b>trois<img src='a>b'></b>",
        ),
        ("one <!-- </b> -->two", "un deux", [(0, 0), (1, 1)], "un <!-- </b> -->deux"),
        ("a &lt; b &amp; <b>c</b>", "a < b & c", [(i, i) for i in range(5)], "a &lt; b &amp; <b>c</b>"),
        ("x<script>if (a<b) {}</script> y", "x y", [(0, 0), (1, 1)], "x <script>if (a<b) {}</script>y"),
        ("<b>one</b> <i>two</i>", "un", [(0, 0)], "<b>un</b><i></i>"),  # fewer words than elements
        ("<b>one</b> <a></a>two", "", [], "<b></b><a></a>"),
    ],
)  # fmt: skip
def test_tags_stand_where_their_words_went(source, translation, links, expected):
    assert carried(source, translation, links) == expected


def test_tokens_inside_a_word_are_never_parted_but_those_of_japanese_are():
    def placed(translation, spans, weights):
        marked = markup.read("<b>a</b> c")
        tokens = np.array([[0, 1], [2, 3], [0, 0]])  # and the end
        return markup.place(marked, translation, np.array(weights), tokens, np.array(spans))

    parts = [[0.9, 0.1, 5.0], [0.4, 0.6, 5.0], [0.0, 1.0, 0.0]]
    assert placed("unbe so", [[0, 2], [2, 4], [5, 7]], parts) == [(0, 4)]
    assert placed("保存する", [[0, 2], [2, 3], [3, 4]], parts) == [(0, 2)]


@pytest.mark.parametrize(
    "opening",
    [
        "<a href=http://x/>", "<a href = /y/ >", "<a title='>' href=/z/>", "<a title=it's>",
        "<a href=>", "<a / >",
    ],
)  # fmt: skip
def test_a_slash_or_a_quote_at_the_end_of_an_unquoted_attribute_belongs_to_it(opening):
    assert markup.read(f"{opening}x</a>y").elements == (markup.Element(opening, "</a>", 0, 1, -1),)
    alone = markup.read("<a b=c /><a b='c'/><a/>y").elements
    assert [e.opening for e in alone] == ["<a b=c />", "<a b='c'/>", "<a/>"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("a <b>c", "<b> at character 3 is not closed; expected </b> after it."),
        ("<b><i>x</b></i>", "</b> at character 8 closes no <b>: expected </i>."),
        ("x</b>", "</b> at character 2 closes no <b>: nothing is open."),
        ("x <b", "'<b' at character 3 begins a tag that does not end"),
        ("x <!-- y", "'<!-- y' at character 3 begins a tag that does not end"),
        ("<script>x", "<script> at character 1 is not closed"),
    ],
)
def test_markup_that_is_not_closed_is_refused_in_a_sentence(source, said):
    with pytest.raises(markup.MarkupError) as error:
        markup.read(source)
    assert said in str(error.value) and "\n" not in str(error.value)


class Tree(HTMLParser):
    """The names of elements with those of their parents, by another parser."""

    def __init__(self, source):
        super().__init__()
        self.open, self.found, self.text = [], [], ""
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, tuple(self.open)))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def trees():
    names = itertools.count()
    word = st.sampled_from(["on", "a", "<", "&", "je", "."]).map(lambda w: html.escape(w) + " ")
    element = lambda inside: st.lists(inside, max_size=3).map(  # noqa: E731
        lambda parts: (lambda n: f"<t{n}>{''.join(parts)}</t{n}>")(next(names))
    )
    leaf = st.one_of(word, st.just("<br>"))
    return st.lists(st.recursive(leaf, element, max_leaves=12), max_size=4).map("".join)


@given(trees(), st.lists(st.sampled_from(["ou", "le", ",", "<b>"]), max_size=8), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_no_element_is_lost_or_leaves_its_parent_and_the_words_stay(source, words, seed):
    translation = " ".join(words)
    marked = markup.read(source)
    own, other = spans_of(marked.text), spans_of(translation)
    weights = np.random.default_rng(seed).dirichlet(np.ones(max(len(own), 1)) * 0.3, len(other))
    spans = markup.place(marked, translation, weights[:, : len(own)], own, other)
    before, after = Tree(source), Tree(markup.write(marked, translation, spans))
    assert sorted(after.found) == sorted(before.found)
    assert after.text == translation and before.text.split() == marked.text.split()


@pytest.mark.parametrize("source", ("foo<img src=x>bar", "un<wbr>able", "a<b> </b>b", "a<b></b>b"))
def test_an_element_without_words_inside_a_word_stands_beside_it(source):
    marked = markup.read(source)
    spans = np.array([[0, len(marked.text)]])
    (placed,) = markup.place(marked, "mot", np.ones((1, 1)), spans, np.array([[0, 3]]))
    assert placed in ((0, 0), (3, 3))


@pytest.mark.parametrize(("text", "marks"), [("메뉴를", "메뉴를"), ("ฉันรัก", "ฉัน")])
def test_words_are_whole_where_a_script_has_blanks(text, marks):
    marked, tokens = markup.read("<b>a</b> b"), np.array([[0, 1], [2, 3]])
    middle = 2 if text == "메뉴를" else 3
    found = np.array([[0, middle], [middle, len(text)]])
    (placed,) = markup.place(marked, text, np.eye(2) + 0.01, tokens, found)
    assert text[slice(*placed)] == marks
