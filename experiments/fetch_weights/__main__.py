"""``python -m experiments.fetch_weights``."""

from experiments import launch
from experiments.fetch_weights import main

if __name__ == "__main__":
    launch.run(main)
