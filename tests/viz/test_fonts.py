"""Any script is drawn by a font that has it, or spelled out with one warning that helps."""

import warnings

import matplotlib
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from crossattn import viz
from crossattn.viz import fonts, scripts

NOBODY_HAS_IT = "\U0010fffd"  # the last private-use character
OLD_PERSIAN = "\U000103a0\U000103a1"


@pytest.fixture(autouse=True)
def fresh_fonts(monkeypatch):
    """What a test does to the font list and to what was warned about ends with the test."""
    known = font_manager.fontManager.ttflist
    monkeypatch.setattr(font_manager.fontManager, "ttflist", list(known))
    caches = (fonts._coverage, fonts._add_font, fonts._warn_once)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def only_dejavu(monkeypatch):
    """A bare machine: the fonts matplotlib brings, nothing in packages or in the system."""
    brought = [e for e in font_manager.fontManager.ttflist if "mpl-data" in e.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", brought)
    monkeypatch.setattr(fonts, "_find_new_fonts", lambda: None)


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


def test_greek_needs_no_other_font_than_the_one_matplotlib_brings(monkeypatch):
    only_dejavu(monkeypatch)
    words = ["ἐν", "ἀρχῇ", "ἦν", "ὁ", "λόγος"]
    assert [label.text for label in fonts.labels(words)] == words


def test_a_character_no_font_has_is_spelled_out_with_a_warning():
    with pytest.warns(viz.GlyphWarning, match="private-use characters, drawn as U. codes"):
        figure = viz.alignment([[1.0]], [f"a{NOBODY_HAS_IT}b"], ["c"])
    assert figure.axes[0].get_xticklabels()[0].get_text() == "aU+10FFFDb"


@pytest.mark.parametrize(
    ("word", "spelled", "said"),
    [
        ("को", "U+0915 094B", r"Devanagari .*fontpkg-noto-sans-devanagari.*fonts-lohit-deva"),
        ("猫が", "U+732B 304C", r"Chinese or Japanese .*matplotlib-fontja.*fonts-noto-cjk"),
        ("고", "U+ACE0", r"Korean .*fonts-noto-cjk"),
        ("👍🏽", "U+1F44D 1F3FD", r"emoji .*fonts-symbola"),
        (OLD_PERSIAN, "U+103A0 103A1", r"Old Persian .*fonts-noto-core"),
        ("\udce3", "U+DCE3", r"surrogate .*decode the bytes"),
    ],
)
def test_a_bare_machine_names_the_script_and_what_to_install(monkeypatch, word, spelled, said):
    only_dejavu(monkeypatch)
    with pytest.warns(viz.GlyphWarning, match=said):
        assert fonts.labels([word])[0].text == spelled


def test_a_script_is_warned_about_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            fonts.labels([NOBODY_HAS_IT, f"x{NOBODY_HAS_IT}"])
    assert [w.category for w in caught] == [viz.GlyphWarning]


def test_a_font_in_a_package_is_found_and_put_first(monkeypatch, tmp_path):
    make_font(tmp_path / "squares.ttf", OLD_PERSIAN)
    monkeypatch.setattr(fonts, "_packaged_folders", lambda: [tmp_path])
    first, plain = fonts.labels([OLD_PERSIAN, "plain"])
    assert first.text == OLD_PERSIAN
    assert first.families == ("Squares", "DejaVu Sans")
    assert plain.families == ("DejaVu Sans",)
    figure = viz.alignment([[1.0]], [OLD_PERSIAN], ["a"])
    assert figure._repr_png_()


def test_a_broken_font_file_is_passed_over(monkeypatch, tmp_path):
    (tmp_path / "broken.ttf").write_bytes(b"not a font")
    monkeypatch.setattr(fonts, "_packaged_folders", lambda: [tmp_path])
    with pytest.warns(viz.GlyphWarning):
        fonts.labels([NOBODY_HAS_IT])


def test_the_family_the_user_set_comes_first():
    with matplotlib.rc_context({"font.family": ["DejaVu Serif"]}):
        assert fonts.labels(["a"])[0].families == ("DejaVu Serif", "DejaVu Sans")


def test_joiners_without_a_shape_are_dropped_without_a_warning(monkeypatch):
    only_dejavu(monkeypatch)
    monkeypatch.setattr(fonts, "_coverage", lambda family: frozenset("ab"))
    assert fonts.labels(["a\u200d\ufe0fb"])[0].text == "ab"


@pytest.mark.parametrize(
    "char", ["ま", "漢", "ン", "한", "क", "ع", "😀", "ა", "\x00", "\ue000", "→"]
)
def test_every_character_has_a_script_and_an_advice(char):
    name, install = scripts.script(char)
    assert name and install


def test_no_box_is_ever_drawn_whatever_fonts_this_machine_has():
    """matplotlib itself warns when it draws a box; here any such warning is an error."""
    words = ["λόγος", "क्षेत्र", "日本語", "العربية", "עברית", "ไทย", "😀", "x\x00y", NOBODY_HAS_IT]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", viz.GlyphWarning)
        figure = viz.alignment(np.eye(len(words)), words, words, title=" ".join(words))
        figure._repr_png_()
