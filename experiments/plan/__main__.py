"""``python -m experiments.plan``."""

from experiments import launch
from experiments.plan import main

if __name__ == "__main__":
    launch.run(main)
