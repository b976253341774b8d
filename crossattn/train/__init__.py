"""Training: state, step, optimisers, sharding, checkpoints, logs, and the loop that combines them.

Each part is usable alone. A `Task` (see `config.py`) brings the model.
"""
