"""Mistakes, made one at a time in a copy of the tree; the tests of each entry must notice it.

``python -m tests.mutants [WORD ...]`` tries the entries of ``mutants.txt`` that contain a word, or all. Run
``make test`` first: a test that fails on sound code notices everything.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 300  # seconds; a mistake that never ends is noticed too


def listed(*words: str) -> list[tuple[str, str, str, list[str]]]:
    """Lists (file and what is wrong, old text, new text, arguments of pytest) of each mutant."""
    mutants = []
    for entry in (ROOT / "tests/mutants.txt").read_text().strip().split("\n\n"):
        name, *lines = entry.split("\n")
        parts = {sign: [x[2:] for x in lines if x[:1] == sign] for sign in "-+>"}
        old, new = ("\n".join(parts[sign]) for sign in "-+")
        if not words or any(word in entry for word in words):
            mutants.append((name, old, new, shlex.split(" ".join(parts[">"]))))
    return mutants


def fate(tree: Path, file: str, old: str, new: str, tests: list[str]) -> str:
    """Runs the tests of a mutant, and returns "killed" or what is wrong."""
    path = tree / file
    sound = path.read_text()
    if sound.count(old) != 1:
        return f"STALE: its old text stands {sound.count(old)} times in the file"
    path.write_text(sound.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run([*command, *tests], cwd=tree, capture_output=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        path.write_text(sound)
    fates = {0: "ALIVE", 1: "killed"}
    return fates.get(run.returncode, f"NOT TRIED: pytest ended with {run.returncode}")


def main(*words: str) -> int:
    """Prints the fate of each, and returns how many are not killed."""
    fates = []
    ignored = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "__pycache__")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=ignored)
        for name, old, new, tests in listed(*words):
            start = time.perf_counter()
            fates.append(fate(tree, name.partition(":")[0], old, new, tests))
            print(f"{fates[-1]:6} {time.perf_counter() - start:4.0f} s  {name}", flush=True)
    print(f"{fates.count('killed')} of {len(fates)} mutants are killed")
    return len(fates) - fates.count("killed")


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:]), 1))
