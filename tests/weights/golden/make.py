"""Makes golden.npz again, which needs torch and transformers: python -m tests.weights.golden.make"""

import tempfile
from pathlib import Path

from experiments.parity import golden
from experiments.parity.cases import CASES

PATH = Path(__file__).with_name("golden.npz")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        golden.make(CASES, PATH, Path(folder))
    print(f"{PATH}: {PATH.stat().st_size / 1e6:.2f} MB")
