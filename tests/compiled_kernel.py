"""A mark that skips tests of the compiled kernel on machines without it."""

import pytest

from crossattn.ops import native

MISSING = native.missing()
needs_kernel = pytest.mark.skipif(MISSING is not None, reason=f"no compiled kernel: {MISSING}")
