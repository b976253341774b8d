"""A tolerance for two computations of one number on any processor, from magnitudes, not from trials."""

import jax
import jax.numpy as jnp
import numpy as np


def close(found, expected, ulps=200, size=None, err_msg=""):
    """Every entry is within ``ulps`` units in the last place of the largest number that went into it.

    A sum in floating point is off by the rounding of its terms, however small the sum itself, and
    what is fused or added first depends on the processor, the compiler and the sizes of blocks. So the
    bound is absolute for a whole array, ``ulps * eps * size``, with eps of the coarser of the two dtypes:
    a float64 oracle leaves that of what is tested. The default is ten times the twenty units that
    sums of hundreds of terms show, 2.4e-5 of the largest entry in float32; a mask, a position or a
    scale that is wrong moves entries by a hundredth of it at least.

    Args:
      found, expected: arrays, or trees of them, each with a bound of its own.
      ulps: more for results of long chains (second derivatives, whole models, many steps).
      size: the largest of the terms, where they are larger than their sums; else the largest
        finite entry that is expected.
    """
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        _close(one, other, ulps, size, err_msg)


def _close(found, expected, ulps, size, err_msg):
    found, expected = np.asarray(found), np.asarray(expected)
    dtypes = [x.dtype for x in (found, expected) if jnp.issubdtype(x.dtype, jnp.floating)]
    eps = max((jnp.finfo(dtype).eps for dtype in dtypes), default=0)  # integers are equal
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if size is None:
        size = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    bound = float(ulps * eps * size)
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound, err_msg=err_msg)
