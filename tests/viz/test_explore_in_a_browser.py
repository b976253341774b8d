"""The page in Chromium: hover, click, keys, heads, sound, narrow and wide, dark and light."""

import numpy as np
import pytest

from crossattn import viz
from tests.browser import Browser
from tests.viz.test_explore import NASTY, SOURCE, TARGET, WEIGHTS

RNG = np.random.default_rng(1)
WORD = '#words [data-at="{}"]'
READ = '#memory [data-at="{}"]'


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def shown(browser, tmp_path):
    """Opens a page in the browser, and checks in the end that it complained of nothing."""

    def show(page, **options):
        path = page.save(tmp_path / "page.html")
        browser.events.clear()
        browser.open(path.as_uri(), **options)
        return browser

    yield show
    assert browser.complaints() == []


def words(**options):
    return viz.explore(WEIGHTS, SOURCE, TARGET, **options)


def shares(browser, selector):
    """How strongly tokens are coloured, relative to the strongest."""
    code = f"[...document.querySelectorAll('{selector}')].map((b) => +b.style.getPropertyValue('--share'))"
    found = np.array(browser.js(code))
    return found / (found.max() or 1)


def test_the_page_decodes_the_weights_that_were_given(shown):
    browser = shown(words())
    mean = browser.js("[...page.views[0].row(null, null, 3)]")
    np.testing.assert_allclose(mean, WEIGHTS[:, :, 3].mean((0, 1)), atol=1 / 510)
    head = browser.js("[...page.views[0].column(1, 2, 4)]")
    np.testing.assert_allclose(head, WEIGHTS[1, 2, :, 4], atol=1 / 510)


def test_hover_shows_what_a_word_reads_and_a_click_keeps_it(shown):
    browser = shown(words())
    assert browser.text("#said").startswith("Point at a word")
    browser.hover(WORD.format(1))
    row = WEIGHTS[:, :, 1].mean((0, 1))
    best = SOURCE[row.argmax()]
    assert browser.text("#said").startswith(f"“w” reads “{best}” {row.max():.2f}, ")
    np.testing.assert_allclose(shares(browser, "#memory button"), row / row.max(), atol=0.01)
    assert browser.js("document.querySelectorAll('#lines path').length") == (row > 0.02).sum()
    browser.leave()
    assert browser.text("#said").startswith("Point at a word")
    browser.click(WORD.format(1))
    browser.leave()
    assert browser.text("#said").startswith("“w” reads")
    browser.key("Escape")
    browser.js("document.activeElement.blur()")
    assert browser.text("#said").startswith("Point at a word")


def test_hover_over_a_source_word_shows_who_reads_it(shown):
    browser = shown(words())
    browser.hover(READ.format(4))
    column = WEIGHTS[..., 4].mean((0, 1))
    np.testing.assert_allclose(shares(browser, "#words button"), column / column.max(), atol=0.02)
    assert browser.text("#said").startswith("“e” is read by ")


def test_a_keyboard_reaches_every_word_and_what_it_reads_is_said(shown):
    browser = shown(words())
    assert browser.js("document.querySelector('#said').getAttribute('aria-live')") == "polite"
    browser.js("document.querySelector('#words button').focus()")
    assert browser.text("#said").startswith("“v” reads")
    for expected in ("w", "x", "y"):
        browser.key("ArrowRight")
        assert browser.text("#said").startswith(f"“{expected}” reads")
    browser.key("ArrowLeft")
    assert browser.text("#said").startswith("“x” reads")
    stops = browser.js(
        "[...document.querySelectorAll('button, select, input, audio')].filter((e) => e.offsetParent"
        " && !(e.innerText || e.labels?.length || e.getAttribute('aria-label'))).length"
    )
    assert stops == 0  # each has a name for a screen reader
    assert browser.js("document.querySelectorAll('#words [tabindex=\"0\"]').length") == 1


def test_a_head_is_chosen_by_its_picture_and_by_the_lists(shown):
    browser = shown(words())
    browser.click(WORD.format(2))
    browser.click('[aria-label="layer 1, head 2"]')
    row = WEIGHTS[1, 2, 2]
    best = f"“x” reads “{SOURCE[row.argmax()]}” {row.max():.2f}"
    browser.leave()
    said = browser.text("#said")
    assert said.startswith(best) and said.endswith("(layer 1, head 2).")
    assert browser.js("[layer.value, head.value].join()") == "1,2"
    assert browser.js("document.querySelectorAll('.head [aria-pressed=true]').length") == 1
    browser.js("layer.value = ''; layer.dispatchEvent(new Event('change'))")
    assert browser.text("#said").endswith("(all layers, head 2).")
    drawn = browser.js(
        "[...document.querySelectorAll('.head canvas')].filter((c) => new Uint32Array("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer).some(Boolean)).length"
    )
    assert drawn == 6


def test_the_matrix_has_a_cell_for_each_pair_and_its_rows_are_words(shown):
    browser = shown(words())
    browser.click("[data-show=matrix]")
    assert browser.js("document.querySelectorAll('#lines path').length") == 0
    browser.hover("#matrix canvas", 0.5, 0.99)
    assert browser.text("#said").startswith("“</s>” reads")


def test_a_head_is_knocked_out_by_a_click(shown):
    whole, without = np.full(5, 0.5), np.full((2, 3, 5), 0.5)
    without[1, 0, 2] = 0.05
    likeliest = [[TARGET] * 3, [[*TARGET[:2], "▁other", *TARGET[3:]], TARGET, TARGET]]
    browser = shown(words(knockouts=viz.Knockouts(whole, without, likeliest)))
    out = '[title^="knock out layer 1, head 0"]'
    assert browser.text(out) == "−0.46"  # ln(0.1) / 5
    browser.click(out)
    assert "1 of 5 tokens would be others" in browser.text("#said")
    assert browser.text("#words small") == "other"
    browser.hover(WORD.format(2))
    assert "“x” from 0.500 to 0.050" in browser.text("#said")
    browser.click(out)
    assert not browser.js("document.querySelector('#words small')")


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1280, False)])
def test_nothing_is_wider_than_the_screen_and_colours_follow_the_system(shown, width, dark):
    source, target = ["▁long"] * 90, ["▁longer", "-", "than"] * 20
    weights = RNG.dirichlet(np.ones(90), (2, 16, 60))
    browser = shown(viz.explore(weights, source, target), width=width, height=700, dark=dark)
    browser.hover(WORD.format(20))
    assert browser.js("document.documentElement.scrollWidth") <= width
    browser.click("[data-show=matrix]")
    assert browser.js("document.documentElement.scrollWidth") <= width
    ground = browser.js("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark


def test_no_text_becomes_a_part_of_the_page(shown):
    count = len(NASTY)
    page = viz.explore(np.ones((count, count)) / count, NASTY, NASTY, title=NASTY[0])
    browser = shown(page)
    texts = browser.js("[...document.querySelectorAll('#words button')].map((b) => b.textContent)")
    assert texts == [token or " " for token in NASTY]
    assert browser.js("document.querySelectorAll('script, img').length") == 2


def test_patches_light_up(shown):
    image = np.full((40, 40, 3), 0.8)
    weights = np.zeros((2, 16))
    weights[0, 5] = weights[1, 10] = 1
    browser = shown(viz.explore(weights, viz.Patches(image, (4, 4)), ["one", "two"]))

    def veil(column, row):  # opacity over the middle of a patch
        return browser.js(
            "(() => { const c = document.querySelector('.area canvas'), [x, y] = "
            f"[{column}, {row}].map((i) => ((i + 0.5) * c.width) / 4);"
            "return c.getContext('2d').getImageData(x, y, 1, 1).data[3]; })()"
        )

    browser.hover(WORD.format(0))
    assert veil(1, 1) == 0 and veil(2, 2) > 150
    browser.hover(WORD.format(1))
    assert veil(1, 1) > 150 and veil(2, 2) == 0
    browser.hover(".area canvas", 1.5 / 4, 1.5 / 4)
    assert browser.text("#said").startswith("patch (2, 2) is read by “one” 1.00, “two” 0.00")


def test_a_click_on_a_word_plays_from_its_start(shown):
    rate, times = 8000, [[0.2, 0.6], [1.5, 1.9]]
    audio = 0.3 * np.sin(np.arange(2 * rate) / 5)
    sound = viz.Sound(RNG.normal(size=(200, 20)), 2.0, times, audio, rate)
    browser = shown(viz.explore(RNG.dirichlet(np.ones(100), 2), sound, ["one", "two"]))
    browser.wait("document.querySelector('audio').readyState > 0")
    assert browser.js("document.querySelector('audio').duration") == pytest.approx(2.0, abs=0.01)
    browser.click(WORD.format(1))
    assert 1.5 <= browser.js("document.querySelector('audio').currentTime") < 2.0


def test_regions_of_a_page_are_read_by_pointing_at_them(shown):
    boxes = [[0.1, 0.1, 0.9, 0.3], [0.1, 0.5, 0.9, 0.9]]
    regions = viz.Regions(np.ones((60, 40)), boxes)
    browser = shown(viz.explore([[0.2, 0.8], [0.6, 0.4]], regions, ["0 title", "1 step"]))
    browser.hover(".area canvas", 0.5, 0.7)
    assert browser.text("#said").startswith("“1 step” reads region 0 title 0.60")
    browser.hover(".area canvas", 0.5, 0.4)
    assert browser.text("#said").startswith("Point at")


def test_several_views_and_the_frame_of_a_notebook(browser, shown, tmp_path):
    two = words(name="one") + viz.explore([[1.0]], ["only"], ["word"], name="two")
    browser = shown(two)
    browser.js("view.value = 1; view.dispatchEvent(new Event('change'))")
    assert browser.text("#words") == "word" and not browser.js("heads.offsetParent")
    (tmp_path / "cell.html").write_text(f"<!doctype html><p>cell</p>{two._repr_html_()}")
    browser.open((tmp_path / "cell.html").as_uri())
    with browser.frame():
        browser.wait("document.readyState === 'complete'")
        assert browser.text("#words") == "vw xy </s>"
