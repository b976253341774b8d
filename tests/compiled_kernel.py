"""Whether the compiled kernel is here, for the tests that are about it."""

import pytest

from crossattn.ops import native
from tests.conftest import one_device

try:
    with one_device():
        native.load()
    MISSING = None
except NotImplementedError as reason:
    MISSING = str(reason)

needs_kernel = pytest.mark.skipif(MISSING is not None, reason=f"no compiled kernel: {MISSING}")
