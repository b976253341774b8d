"""A cell for each head, with its number."""

import numpy as np
import pytest

from crossattn import viz
from tests.peers import package


def test_each_head_of_each_attention_has_a_cell_with_its_number():
    package("matplotlib", "viz")
    entropy = np.array([[0.25, 1.5], [2.0, 0.75]])
    links = np.array([[0.1, 0.2, 0.3]])
    figure = viz.statistics(
        {"encoder.attention": {"entropy": entropy}, "decoder.cross": {"links": links}}, "step 3"
    )
    first, second = figure.axes
    assert [text.get_text() for text in first.texts] == ["0.25", "1.50", "2.00", "0.75"]
    assert [text.get_position() for text in second.texts] == [(0, 2), (1, 2), (2, 2)]
    assert [t.get_text() for t in first.get_yticklabels()] == [
        "encoder.attention 0", "encoder.attention 1", "decoder.cross 0",
    ]  # fmt: skip
    assert figure.get_suptitle() == "step 3"
    with pytest.raises(ValueError, match="there are no numbers to draw"):
        viz.statistics({})
