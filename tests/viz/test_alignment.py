"""The picture says what the weights say: order, darkness, links, sizes, files."""

import io
import subprocess
import sys
import xml.etree.ElementTree

import jax.numpy as jnp
import matplotlib.style
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from crossattn import viz

SOURCE = ["The", "black", "cat", "sleeps"]
TARGET = ["Le", "chat", "noir"]
WEIGHTS = np.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.6, 0.1], [0.0, 0.9, 0.1, 0.0]])


def texts(ticks):
    return [tick.get_text() for tick in ticks]


def lightness(figure, ax, row, column):
    """Mean of the red, green and blue of the pixel in the middle of a cell, as drawn."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=figure.dpi)
    buffer.seek(0)
    image = imread(buffer)
    x, y = ax.transData.transform((column + 0.3, row + 0.3))
    return float(image[image.shape[0] - 1 - int(y), int(x), :3].mean())


def test_importing_needs_no_matplotlib_and_drawing_no_pyplot():
    code = """if True:
        import sys, crossattn.viz as viz
        assert 'matplotlib' not in sys.modules
        sys.modules['matplotlib'] = None
        for draw in (lambda: viz.heads([[[1.0]]], ['a'], ['b']), lambda: viz.captions([[[1]]], 'a')):
            try:
                draw()
            except ModuleNotFoundError as error:
                assert 'pip install matplotlib' in str(error), error
        del sys.modules['matplotlib']
        assert viz.alignment([[1.0]], ['a'], ['b'])._repr_png_().startswith(b'\\x89PNG')
        assert 'matplotlib.pyplot' not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_source_runs_along_the_top_and_target_downward():
    ax = viz.alignment(WEIGHTS, SOURCE, TARGET).axes[0]
    assert texts(ax.get_xticklabels()) == SOURCE
    assert texts(ax.get_yticklabels()) == TARGET
    first, last = (ax.transData.transform((0, row))[1] for row in (0, 2))
    assert first > last
    panel = ax.get_window_extent()
    assert ax.get_xticklabels()[0].get_window_extent().y0 > panel.y1
    assert ax.get_yticklabels()[0].get_window_extent().x1 < panel.x0


@pytest.mark.parametrize("factor, least", [(1, 0), (40, -8)], ids=["shares", "any numbers"])
def test_a_cell_is_darker_the_larger_its_weight(factor, least):
    figure = viz.alignment(WEIGHTS * factor + least, SOURCE, TARGET)
    drawn = [[lightness(figure, figure.axes[0], t, s) for s in range(4)] for t in range(3)]
    order = np.argsort(WEIGHTS, axis=None)
    falling = np.diff(np.array(drawn).ravel()[order])
    assert np.all(falling <= 1e-6)
    assert np.unravel_index(np.argmin(drawn), WEIGHTS.shape) == (2, 1)
    assert texts(figure.axes[1].get_yticklabels())[0] == str(least)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32])
def test_jax_arrays_of_any_dtype_are_drawn(dtype):
    ax = viz.alignment(jnp.asarray(WEIGHTS * 8, dtype), SOURCE, TARGET).axes[0]
    expected = np.asarray(jnp.asarray(WEIGHTS * 8, dtype)).astype(np.float32)
    np.testing.assert_array_equal(ax.images[0].get_array(), expected)


LINKS = [(0, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize("links", [[*LINKS, (2, 1)], set(LINKS), jnp.array(LINKS), []])
def test_links_outline_exactly_the_cells_they_name(links):
    ax = viz.alignment(np.zeros((3, 4)), SOURCE, TARGET, links=links).axes[0]
    outlined = [p for p in ax.patches if p.get_gid() == "link"]
    centres = [tuple(np.round(p.get_center()).astype(int).tolist()) for p in outlined]
    assert sorted(centres) == (LINKS if len(links) else [])


@pytest.mark.parametrize("count", [1, 9, 60, 150])
def test_everything_written_is_inside_the_figure_and_labels_do_not_overlap(count):
    tokens = [f"token{i}" for i in range(count)]
    figure = viz.alignment(np.eye(count), tokens, tokens, title="A title longer than the picture")
    drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(a.y0 >= b.y1 - 2 for a, b in zip(boxes, boxes[1:], strict=False))
    assert len(boxes) == count if count <= 60 else len(boxes) >= count / 4


def test_blanks_are_visible_formulas_are_text_and_long_tokens_are_cut():
    source = [" ", "\n", "$x_1$", "a" * 99]
    ax = viz.alignment(WEIGHTS, source, TARGET).axes[0]
    assert texts(ax.get_xticklabels()) == ["␣", "↵", "$x_1$", "a" * 23 + "…"]
    assert not ax.get_xticklabels()[2].get_parse_math()


def test_axes_of_ones_own_keep_their_figure_and_place():
    figure = Figure(figsize=(4, 3))
    left, right = figure.subplots(1, 2)
    assert viz.alignment(WEIGHTS, SOURCE, TARGET, ax=right, title="mine") is figure
    assert tuple(figure.get_size_inches()) == (4, 3)
    assert texts(right.get_xticklabels()) == SOURCE
    assert right.get_title(loc="left") == "mine"
    assert not left.images


def test_pictures_are_light_under_a_dark_style(tmp_path):
    with matplotlib.style.context("dark_background"):
        path = viz.save(viz.alignment(WEIGHTS, SOURCE, TARGET), tmp_path / "a.png")
    assert imread(path)[0, 0, :3].min() == 1


def test_save_writes_what_the_suffix_says(tmp_path):
    figure = viz.alignment(WEIGHTS, SOURCE, TARGET, links=[(0, 0)])
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        path = viz.save(figure, tmp_path / "new" / f"a{suffix}")
        assert path.read_bytes().startswith(start)
    root = xml.etree.ElementTree.parse(tmp_path / "new" / "a.svg").getroot()
    assert len([node for node in root.iter() if node.get("id") == "link"]) == 1
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["a.pdf", "a.png", "a.svg"]
    with pytest.raises(ValueError, match="'a.jpg' must end in .png, .svg, .pdf"):
        viz.save(figure, tmp_path / "a.jpg")


def test_a_failed_save_keeps_the_picture_before(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"before")

    class Full(Figure):
        def savefig(self, *args, **kwargs):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        viz.save(Full(), path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


NAN = np.where(WEIGHTS == 0.6, np.nan, WEIGHTS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(weights=WEIGHTS[None]), r"shape \[1, 3, 4\] but \[T, S\] is expected"),
        (dict(weights=WEIGHTS[:0], target_tokens=[]), "nothing to draw"),
        (dict(source_tokens=SOURCE[:3]), "source_tokens has 3 entries but weights has 4 columns"),
        (dict(target_tokens=TARGET[:1]), "target_tokens has 1 entries but weights has 3 rows"),
        (dict(source_tokens=TARGET, target_tokens=SOURCE), "are the two swapped"),
        (dict(weights=NAN), r"1 NaN or infinite values, the first at \[1, 2\]"),
        (dict(weights=jnp.asarray(NAN, jnp.bfloat16)), "1 NaN"),
        (dict(weights=WEIGHTS.astype(complex)), "complex"),
        (dict(links=[(0, 3)]), r"\(0, 3\) but there are 4 source and 3 target"),
        (dict(links=[(-1, 0)]), r"\(-1, 0\)"),
        (dict(links=[(0, 1, 2)]), "pairs of integers"),
        (dict(links=[(0.5, 1)]), "pairs of integers"),
        (dict(links=[3]), "pairs of integers"),
        (dict(links=[(0, 1), (2,)]), "pairs of integers"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(changes, said):
    given = dict(weights=WEIGHTS, source_tokens=SOURCE, target_tokens=TARGET)
    with pytest.raises(ValueError, match=said):
        viz.alignment(**given | changes)
