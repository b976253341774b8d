"""A call as one program: of one step by step, each operation of each shape is a program to make."""

import jax
import numpy as np
from flax import nnx


def compiled(call, *args, **kwargs):
    """Returns ``call(*args, **kwargs)`` of one program, which takes the arrays, also those of modules."""
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, nnx.Module))
    arrays = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, nnx.Module):
            leaves[i], arrays[i] = nnx.split(leaf)
        elif isinstance(leaf, jax.Array | np.ndarray):
            arrays[i] = leaf

    @jax.jit
    def program(arrays):
        whole = list(leaves)
        for i, x in arrays.items():
            whole[i] = nnx.merge(leaves[i], x) if isinstance(leaves[i], nnx.GraphDef) else x
        args, kwargs = jax.tree.unflatten(tree, whole)
        return call(*args, **kwargs)

    return program(arrays)
