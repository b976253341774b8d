"""Files that appear whole or not at all."""

import pytest

from crossattn.files import whole


def test_a_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with whole(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), whole(path) as unfinished:
        unfinished.write_text("ne")
        raise OSError("the disk is full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
