"""A page to explore has what it was given, within 8 bits; no text breaks it; it loads nothing."""

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from crossattn import viz
from crossattn.viz import pixels
from crossattn.viz.explore import LARGEST

RNG = np.random.default_rng(0)
WEIGHTS = RNG.dirichlet(np.full(7, 0.3), (2, 3, 5))  # [L N T S]
SOURCE, TARGET = list("abcdefg"), ["▁v", "w", "▁x", "y", "</s>"]
NASTY = [
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", "' \" ` \\ & &amp; ${x}", "\u2028\u2029\0",
    "שלום", "مرحبا", "👩🏽\u200d🚀", "\u202eevil", "\ud800", "", "<img src=x onerror=alert(1)>", "$title $$",
]  # fmt: skip


class Parts(HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.attributes = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))

    def handle_data(self, data):
        self.texts.append((self.tags[-1] if self.tags else "", data))


def data_of(page):
    parts = Parts(page.html)
    (number,) = (i for i, own in enumerate(parts.attributes) if own.get("id") == "data")
    assert parts.tags[number] == "script"
    return json.loads(re.search(r'id="data">(.*?)</script>', page.html, re.DOTALL)[1])


def weights_of(view):
    levels = np.frombuffer(base64.b64decode(view["weights"]), np.uint8).reshape(view["shape"])
    scale = np.frombuffer(base64.b64decode(view["scale"]), "<f4").reshape(view["shape"][:3])
    return levels / 255 * scale[..., None]


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_weights_are_the_given_ones_within_a_510th_of_the_largest_of_the_row(axes):
    given = WEIGHTS[(0,) * (4 - axes)]
    (view,) = data_of(viz.explore(given, SOURCE, TARGET))["views"]
    assert view["shape"] == [1] * (4 - axes) + list(given.shape)
    off = np.abs(weights_of(view) - given)
    assert (off <= given.max(-1, keepdims=True) / 510 * (1 + 1e-5)).all() and off.max() > 0


def test_a_row_of_zeros_stays_zero():
    (view,) = data_of(viz.explore(np.zeros((5, 7)), SOURCE, TARGET))["views"]
    assert not weights_of(view).any()


def test_no_text_breaks_the_page():
    count = len(NASTY)
    weights = np.ones((count, count)) / count
    page = viz.explore(weights, NASTY, NASTY[::-1], name=NASTY[0], title=NASTY[0])
    page.html.encode()  # a lone surrogate would not
    (view,) = data_of(page)["views"]
    assert [token for token, _ in view["tokens"]] == NASTY[::-1]
    assert [token for token, _ in view["memory"]["tokens"]] == NASTY
    parts = Parts(page.html)
    plain = Parts(viz.explore(weights, ["a"] * count, ["b"] * count).html)
    assert parts.tags == plain.tags and "img" not in parts.tags
    assert ("title", NASTY[0]) in [(tag, text) for tag, text in parts.texts]


def test_tokens_that_begin_words_and_the_direction_of_the_text():
    (view,) = data_of(viz.explore(WEIGHTS[0, 0], ["שלום", *"bcdefg"], TARGET))["views"]
    assert view["tokens"] == [["v", True], ["w", False], ["x", True], ["y", False], ["</s>", True]]
    assert view["memory"]["rtl"] and not view["rtl"] and all(b for _, b in view["memory"]["tokens"])
    assert view["name"] == "vw xy"


def test_the_page_loads_nothing_and_runs_its_own_script_alone():
    page = viz.explore(WEIGHTS, SOURCE, TARGET)
    parts = Parts(page.html)
    assert not any({"src", "href"} & own.keys() for own in parts.attributes)
    (policy,) = (own["content"] for own in parts.attributes if "http-equiv" in own)
    assert policy.startswith("default-src 'none'; ") and "unsafe-eval" not in policy
    script = page.html.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy


def test_a_notebook_shows_the_page_in_a_frame_apart():
    page = viz.explore(WEIGHTS, SOURCE, TARGET, title='a "b" <c>')
    parts = Parts(page._repr_html_())
    assert parts.tags == ["iframe"]
    assert parts.attributes[0]["srcdoc"] == page.html
    assert parts.attributes[0]["sandbox"] == "allow-scripts"


def test_pages_are_joined_and_written_whole(tmp_path):
    one, two = (viz.explore(WEIGHTS, SOURCE, TARGET, name=name) for name in ("one", "two"))
    path = (one + two).save(tmp_path / "new" / "page.html")
    assert path.read_text() == (one + two).html
    assert [view["name"] for view in data_of(one + two)["views"]] == ["one", "two"]
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    with pytest.raises(ValueError, match="'page.png' must end in .html"):
        one.save(tmp_path / "page.png")


def test_what_would_have_2_mb_is_refused_and_what_has_less_is_not():
    many = np.full((6, 16, 100, 100), 0.01)
    assert len(viz.explore(many, ["a"] * 100, ["b"] * 100).html) < LARGEST
    with pytest.raises(
        ValueError, match=r"would have 2\.\d MB, and is to stay under 2; give fewer"
    ):
        viz.explore(np.tile(many, (2, 1, 1, 1))[:10], ["a"] * 100, ["b"] * 100)


@pytest.mark.parametrize("shape", [(30, 20), (30, 20, 3), (1, 1), (1500, 4)])
def test_pictures_are_png_as_pillow_reads_them(shape):
    picture = RNG.random(shape)
    levels = np.rint(picture * 255).astype(np.uint8)
    read = np.asarray(Image.open(io.BytesIO(pixels.png(levels))))
    np.testing.assert_array_equal(read, levels)
    shown = Image.open(io.BytesIO(base64.b64decode(pixels.data_uri(picture).partition(",")[2])))
    step = -(-max(shape[:2]) // 640)
    assert shown.size == (-(-shape[1] // step), -(-shape[0] // step))
    if step > 1:
        means = picture[: shape[0] // step * step].reshape(-1, step, shape[1])[:, :, 0].mean(1)
        first = np.asarray(shown)[: len(means), 0] / 255
        mean = picture[:step, : min(step, shape[1])].mean()
        assert abs(first[0] - mean) < 1 / 255


def test_a_sound_keeps_its_mass_its_samples_and_its_times():
    weights = RNG.dirichlet(np.full(1500, 0.1), (2, 5))
    audio = np.clip(RNG.normal(0, 0.2, 8000), -1, 1)
    times = np.arange(10).reshape(5, 2) / 10
    sound = viz.Sound(RNG.normal(size=(300, 80)), 3.0, times, audio, 8000)
    (view,) = data_of(viz.explore(weights, sound, TARGET))["views"]
    assert view["kind"] == "sound" and view["shape"] == [1, 2, 5, 500]
    summed = weights.reshape(1, 2, 5, 500, 3).sum(-1)
    assert np.abs(weights_of(view) - summed).max() <= summed.max() / 509
    assert view["memory"]["times"] == times.tolist()
    coded = np.frombuffer(base64.b64decode(view["memory"]["audio"]["samples"]), np.uint8)
    x = coded / 127.5 - 1  # as the page reads it
    heard = np.sign(x) * (256 ** np.abs(x) - 1) / 255
    # Half a level is ln(256) / 255 of the sample plus 1/255.
    assert (np.abs(heard - audio) <= 1.05 * np.log(256) / 255 * (np.abs(audio) + 1 / 255)).all()


@pytest.mark.parametrize(("heads", "places"), [((4, 6), 375), ((6, 8), 188)])
def test_half_a_minute_of_sound_in_all_heads_of_a_small_whisper_is_a_page(heads, places):
    weights = np.full((*heads, 80, 1500), 1 / 1500)
    noise = RNG.normal(0, 0.2, 30 * 16_000)
    sound = viz.Sound(RNG.normal(size=(3000, 80)), 30.0, None, noise)
    (view,) = data_of(viz.explore(weights, sound, ["word"] * 80))["views"]
    assert view["shape"] == [*heads, 80, places]


def test_knockouts_are_differences_of_log_probability():
    whole = RNG.uniform(0.1, 1, 5)
    without = RNG.uniform(0.1, 1, (2, 3, 5))
    likeliest = [[[*TARGET[:4], "▁other"] for _ in range(3)] for _ in range(2)]
    outs = viz.Knockouts(whole, without, likeliest)
    (view,) = data_of(viz.explore(WEIGHTS, SOURCE, TARGET, knockouts=outs))["views"]
    said = view["knockouts"]
    np.testing.assert_allclose(said["loss"], np.log(without / whole).mean(-1), atol=6e-5)
    np.testing.assert_allclose(said["probabilities"], without, atol=6e-5)
    assert said["instead"][1][2] == [None, None, None, None, "other"]


PAGE = viz.Regions(np.ones((9, 9)), [[0.1, 0.1, 0.9, 0.3]])
SOUND = dict(spectrogram=np.ones((4, 3)), seconds=1.0)


@pytest.mark.parametrize(
    ("weights", "source", "changes", "said"),
    [
        (None, SOURCE, {}, "weights is None; call the model with return_weights=True"),
        (np.ones(()), SOURCE, {}, r"weights has shape \[\] but"),
        (np.zeros((5, 0)), [], {}, "there is nothing to draw"),
        (WEIGHTS[None], SOURCE, {}, r"but \[T, S\] or \[N, T, S\] or \[L, N, T, S\] is expected"),
        (-WEIGHTS, SOURCE, {}, "expected attention, numbers of 0 or more"),
        (WEIGHTS * np.nan, SOURCE, {}, "NaN or infinite"),
        (WEIGHTS, SOURCE[1:], {}, "source_tokens has 6 entries but weights has 7 columns"),
        (WEIGHTS, viz.Patches(np.ones((4, 4)), (2, 3)), {}, "grid is 2 x 3 patches, but weights has 7"),
        (WEIGHTS, viz.Patches(np.ones((4, 4, 2)), (1, 7)), {}, r"image has shape \[4, 4, 2\]"),
        (WEIGHTS, PAGE, {}, "boxes has 1 regions, but weights has 5 rows and 7 columns"),
        (WEIGHTS, viz.Sound(np.ones(4), 1.0), {}, r"spectrogram has shape \[4\]; expected \[F, M\]"),
        (WEIGHTS, viz.Sound(np.ones((4, 3)), 0.0), {}, "seconds is 0.0; expected more than 0"),
        (WEIGHTS, viz.Sound(**SOUND, times=[[0, 1]]), {}, r"times has shape \[1, 2\]; expected \[5, 2\]"),
        (WEIGHTS, viz.Sound(**SOUND, audio=np.ones((2, 2))), {}, r"audio has shape \[2, 2\]"),
        (WEIGHTS, SOURCE, dict(whole=np.ones(4)), r"expected \[2, 3, 5\] and \[5\]"),
        (WEIGHTS, SOURCE, dict(probabilities=np.ones((2, 2, 5))), r"probabilities of shape \[2, 2, 5\]"),
        (WEIGHTS, SOURCE, dict(whole=np.full(5, 2.0)), "numbers outside 0 to 1"),
        (WEIGHTS, SOURCE, dict(likeliest=[[TARGET] * 3]), r"likeliest is not of \[2, 3, 5\] strings"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(weights, source, changes, said):
    outs = dict(whole=np.ones(5), probabilities=np.ones((2, 3, 5))) | changes
    knockouts = viz.Knockouts(**outs) if changes else None
    with pytest.raises(ValueError, match=said) as raised:
        viz.explore(weights, source, TARGET, knockouts=knockouts)
    assert "\n" not in str(raised.value)
