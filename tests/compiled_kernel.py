"""Whether the compiled kernel is here, for the tests that are about it."""

import pytest

from crossattn.ops import native

MISSING = native.missing()
needs_kernel = pytest.mark.skipif(MISSING is not None, reason=f"no compiled kernel: {MISSING}")
