"""Training that knows no model: state, step, optimisers, sharding, checkpoints, logs, the loop.

A model comes in as a `Task` (see `config.py`); the loop puts the others together (see `loop.py`), each of
which is usable alone.
"""
