"""Kernels on accelerators, found in the programs that are lowered for them."""

import pytest

from tests.conftest import ROOT
from tests.ops import lowered


@pytest.mark.slow  # a hundred programs for one table of a page
def test_every_kind_of_call_lowers_and_the_documentation_says_which_are_fused():
    assert lowered.table() in (ROOT / "docs/attend.md").read_text(encoding="utf-8")
