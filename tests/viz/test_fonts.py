"""Any script is drawn by a font that has it, or spelled out with one warning that helps."""

import warnings

import matplotlib
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from crossattn import viz
from crossattn.viz import figure

NOBODY_HAS_IT = "\U0010fffd"  # the last private-use character
OLD_PERSIAN = "\U000103a0\U000103a1"


@pytest.fixture(autouse=True)
def fresh_fonts(monkeypatch):
    """Changes of the font list, and warnings given once, end with the test."""
    known = font_manager.fontManager.ttflist
    monkeypatch.setattr(font_manager.fontManager, "ttflist", list(known))
    caches = figure._charmap, figure._family_of, figure._fonts, figure._warn_once
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def only_dejavu(monkeypatch):
    """A bare machine: the fonts matplotlib brings, nothing in packages or in the system."""
    brought = [e for e in font_manager.fontManager.ttflist if "mpl-data" in e.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", brought)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [])
    monkeypatch.setattr(figure, "_packaged_fonts", lambda: [])


def make_font(path, characters):
    """Writes a font whose characters are all a square."""
    pen = TTGlyphPen(None)
    for place, point in enumerate([(0, 0), (0, 500), (500, 500), (500, 0)]):
        (pen.lineTo if place else pen.moveTo)(point)
    pen.closePath()
    square, names = pen.glyph(), [f"u{ord(c):X}" for c in characters]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names])
    builder.setupCharacterMap({ord(c): name for c, name in zip(characters, names, strict=True)})
    builder.setupGlyf(dict.fromkeys([".notdef", *names], square))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names], (600, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


def test_greek_needs_no_other_font_than_the_one_matplotlib_brings(only_dejavu):
    words = ["ἐν", "ἀρχῇ", "ἦν", "ὁ", "λόγος"]
    assert [label.text for label in figure.labels(words)] == words


@pytest.mark.parametrize(
    ("word", "spelled", "said"),
    [
        ("को", "U+0915U+094B", r"DEVANAGARI characters, .*fontpkg-noto-sans-devanagari"),
        ("猫が", "U+732BU+304C", r"CJK characters, .*matplotlib-fontja"),
        ("고", "U+ACE0", r"HANGUL characters, .*apt-get install fonts-noto"),
        (f"a{NOBODY_HAS_IT}b", "aU+10FFFDb", "unnamed characters"),
        ("\udce3", "U+DCE3", "unnamed characters"),
    ],
)
@pytest.mark.filterwarnings("ignore::crossattn.viz.GlyphWarning")
def test_a_bare_machine_names_the_script_and_what_to_install(only_dejavu, word, spelled, said):
    with pytest.warns(viz.GlyphWarning, match=said):
        assert figure.label(word).text == spelled


def test_a_script_is_warned_about_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            figure.labels([NOBODY_HAS_IT, f"x{NOBODY_HAS_IT}"])
    assert [w.category for w in caught] == [viz.GlyphWarning]


def test_a_font_in_a_package_is_found_and_put_first(only_dejavu, monkeypatch, tmp_path):
    make_font(tmp_path / "squares.ttf", OLD_PERSIAN)
    (tmp_path / "broken.ttf").write_bytes(b"not a font")
    paths = [str(tmp_path / name) for name in ("broken.ttf", "squares.ttf")]
    monkeypatch.setattr(figure, "_packaged_fonts", lambda: paths)
    first, plain = figure.labels([OLD_PERSIAN, "plain"])
    assert first.text == OLD_PERSIAN
    assert first.families == ("Squares", "sans-serif", "DejaVu Sans")
    assert plain.families == ("sans-serif", "DejaVu Sans")
    assert viz.alignment([[1.0]], [OLD_PERSIAN], ["a"])._repr_png_()


def test_hindi_and_japanese_are_drawn_by_the_fonts_of_the_extra():
    for word, family in (("क्षेत्र", "Noto Sans Devanagari"), ("日本語", "IPAexGothic")):
        label = figure.label(word)
        assert (label.text, label.families[0]) == (word, family)


def test_joiners_without_a_shape_are_dropped_without_a_warning(only_dejavu, monkeypatch):
    monkeypatch.setattr(figure, "_charmap", lambda path: frozenset("ab"))
    assert figure.label("a\u200d\ufe0fb").text == "ab"


def test_the_family_the_user_set_comes_first():
    with matplotlib.rc_context({"font.family": ["DejaVu Serif"]}):
        assert figure.labels(["a"])[0].families == ("DejaVu Serif", "DejaVu Sans")


def test_no_box_is_ever_drawn_whatever_fonts_this_machine_has():
    """matplotlib itself warns when it draws a box; here any such warning is an error."""
    words = ["λόγος", "क्षेत्र", "日本語", "العربية", "עברית", "ไทย", "😀", "x\x00y", NOBODY_HAS_IT]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", viz.GlyphWarning)
        figure = viz.alignment(np.eye(len(words)), words, words, title=" ".join(words))
        figure._repr_png_()
        regions = np.linspace(0.1, 0.8, len(words))[:, None] + [0, 0, 0.1, 0.05]
        viz.page(np.ones((90, 60)), regions, words)._repr_png_()
