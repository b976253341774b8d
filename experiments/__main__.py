"""``python -m experiments``: the launchers, the benchmarks and the configs, a line each."""

import ast
import signal
from collections.abc import Iterator
from pathlib import Path

from experiments import begun

_HERE = Path(__file__).parent
_CONFIGS = _HERE.parent / "configs"


def main() -> int:
    """Prints the list, read off files that are not imported."""
    rows = {
        "launchers (python -m NAME --help)": list(_started(_HERE)),
        "benchmarks and comparisons": list(_started(_HERE / "bench")),
        "configs (--config=NAME; :tiny takes seconds)": list(_configs()),
    }
    width = max(len(name) for listed in rows.values() for name, _ in listed)
    for title, listed in rows.items():
        print(f"{title}:")
        for name, text in listed:
            print(f"  {name:<{width}}  {text}")
        print()
    return 0


def _started(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the modules and packages of a folder that ``python -m`` starts."""
    package = ".".join(folder.relative_to(_HERE.parent).parts)
    for path in sorted(folder.glob("*.py")):
        if path.stem[0] != "_" and 'if __name__ == "__main__"' in path.read_text():
            yield f"{package}.{path.stem}", _first_line(path)
    for path in sorted(folder.glob("*/__main__.py")):
        yield f"{package}.{path.parent.name}", _first_line(path.parent / "__init__.py")


def _configs() -> Iterator[tuple[str, str]]:
    for path in sorted(_CONFIGS.glob("*.py")):
        if "\ndef get_config(" in path.read_text():
            yield f"configs/{path.name}", _first_line(path)


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    begun()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may end first
    raise SystemExit(main())
