"""Flags of the benchmarks: ``--help`` shows a script's docstring, and errors are one line."""

import argparse
import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import experiments


class Options(argparse.ArgumentParser):
    """A parser with the help and the errors of launchers; ``doc`` is the docstring of the script."""

    def __init__(self, doc: str | None):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(_command(), description=doc, formatter_class=raw, allow_abbrev=False)
        experiments.begun()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses flags; the error about an unknown one names the most similar."""
        parsed, extra = self.parse_known_args(args, namespace)
        if extra:
            known = [option for action in self._actions for option in action.option_strings]
            near = get_close_matches(extra[0].partition("=")[0], known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ";"
            self.error(f"got {extra[0]}, which it does not take{meant} --help lists what it does.")
        return parsed

    def needs(self, *modules: str, install: str) -> None:
        """Ends the script with a line where modules are missing."""
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            self.error(f"{' and '.join(missing)} missing: pip install '{install}'")

    def error(self, message: str) -> NoReturn:
        """Prints one line, and ends with exit code 2."""
        print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
        sys.exit(2)


def _command() -> str:
    parts = Path(sys.argv[0]).with_suffix("").parts
    if "experiments" not in parts:
        return Path(sys.argv[0]).name
    start = len(parts) - 1 - parts[::-1].index("experiments")
    return f"python -m {'.'.join(part for part in parts[start:] if part != '__main__')}"
