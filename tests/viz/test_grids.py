"""Heads and galleries: every panel in its place, one colour scale, tokens on the outside."""

import itertools

import numpy as np
import pytest

from crossattn import viz

SOURCE = ["The", "black", "cat", "sleeps"]
TARGET = ["Le", "chat", "noir"]


def weights(*shape):
    return np.random.default_rng(0).random(shape)


def panels(figure):
    return [ax for ax in figure.axes if ax.images and ax.get_xlim()[0] == -0.5]


def written(ax):
    across = [tick.get_text() for tick in ax.get_xticklabels()]
    return across, [tick.get_text() for tick in ax.get_yticklabels()]


def apart(figure):
    """Whether no panel's cells and labels lie over another's."""
    boxes = [ax.get_tightbbox() for ax in figure.axes]
    return not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


@pytest.mark.parametrize(
    ("count", "columns"), [(1, 1), (2, 2), (4, 4), (6, 3), (8, 4), (12, 4), (16, 4), (5, 4)]
)
def test_heads_of_one_layer_wrap_without_holes_where_they_can(count, columns):
    shown = panels(viz.heads(weights(count, 3, 4), SOURCE, TARGET))
    assert len(shown) == count
    assert len({round(ax.get_position().x0, 6) for ax in shown}) == columns


def test_every_head_has_its_own_panel_its_name_and_the_links_and_tokens_are_outside():
    values = weights(2, 3, 3, 4)
    figure = viz.heads(values, SOURCE, TARGET, links=[(0, 0), (2, 1)], title="Heads")
    shown = panels(figure)
    for i, ax in enumerate(shown):
        layer, head = divmod(i, 3)
        np.testing.assert_allclose(ax.images[0].get_array(), values[layer, head], rtol=1e-6)
        assert ax.get_xlabel() == f"L{layer} H{head}"
        assert written(ax) == (SOURCE if layer == 0 else [], TARGET if head == 0 else [])
        assert len(ax.patches) == 2
    assert apart(figure) and len(figure.axes) == 7
    first, second = shown[0].get_position(), shown[3].get_position()
    assert first.x0 == pytest.approx(second.x0)
    assert first.y0 > second.y1


def test_heads_refuse_what_they_cannot_place():
    with pytest.raises(ValueError, match=r"\[N, T, S\] or \[L, N, T, S\] is expected"):
        viz.heads(weights(3, 4), SOURCE, TARGET)
    with pytest.raises(ValueError, match="one row a layer"):
        viz.heads(weights(2, 2, 3, 4), SOURCE, TARGET, columns=1)
    with pytest.raises(ValueError, match="columns must be at least 1, got 0"):
        viz.heads(weights(2, 3, 4), SOURCE, TARGET, columns=0)


def test_a_gallery_holds_sentences_of_different_lengths():
    values = [weights(3, 4), 0.01 * weights(2, 3), weights(3, 4) / 2]
    sources = [SOURCE, SOURCE[:3], SOURCE]
    targets = [TARGET, TARGET[:2], TARGET]
    figure = viz.gallery(
        values, sources, targets, titles=["a", "b", "c"], links=[[(0, 0)], None, [(1, 1), (2, 2)]]
    )
    shown = panels(figure)
    assert [written(ax) for ax in shown] == list(zip(sources, targets, strict=True))
    assert [ax.get_title(loc="left") for ax in shown] == ["a", "b", "c"]
    assert [len(ax.patches) for ax in shown] == [1, 0, 2]
    assert {ax.images[0].get_clim() for ax in shown} == {(0, values[0].max())}
    assert apart(figure)


def test_cells_are_as_large_beside_a_longer_sentence_as_alone():
    sizes = [(9, 11), (16, 15), (9, 11), (9, 8)]
    words = [[str(i) for i in range(16)]] * 4
    shown = [[words[i][:n] for i, n in enumerate(sides)] for sides in zip(*sizes, strict=True)]
    targets, sources = shown
    figure = viz.gallery([weights(*size) for size in sizes], sources, targets)
    assert apart(figure)
    for ax, size in zip(panels(figure), sizes, strict=True):
        cells = ax.get_position().size * figure.get_size_inches() / size[::-1]
        np.testing.assert_allclose(cells, 0.32, rtol=0.03)


def test_a_gallery_of_long_sentences_is_one_column():
    tokens = [str(i) for i in range(40)]
    shown = panels(viz.gallery([np.eye(40)] * 2, [tokens] * 2, [tokens] * 2))
    assert shown[0].get_position().x0 == pytest.approx(shown[1].get_position().x0)


def test_a_gallery_names_the_sentence_that_is_wrong():
    with pytest.raises(
        ValueError, match=r"source_tokens\[1\] has 3 entries but weights\[1\] has 4"
    ):
        viz.gallery([weights(3, 4)] * 2, [SOURCE, SOURCE[:3]], [TARGET] * 2)
    with pytest.raises(ValueError, match="got 2 weights, 1 source_tokens, 2 target_tokens"):
        viz.gallery([weights(3, 4)] * 2, [SOURCE], [TARGET] * 2)
    with pytest.raises(ValueError, match="at least one sentence"):
        viz.gallery([], [], [])
