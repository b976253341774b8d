"""Training that knows no model: state, step, optimisers, sharding, checkpoints, logs, the loop.

A model comes in as a `Task` (see `loop.py`); everything else is one file each, usable alone.
"""
