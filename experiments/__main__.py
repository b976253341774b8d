"""``python -m experiments``: the launchers, the benchmarks and the configs, a line each.

Files are read, not imported, so the list is there at once.
"""

import ast
import signal
from collections.abc import Iterator
from pathlib import Path

from experiments import begun

_HERE = Path(__file__).parent
_CONFIGS = _HERE.parent / "configs"


def main() -> int:
    """Print the list."""
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
    """The modules and packages of a folder that ``python -m`` starts."""
    package = ".".join(folder.relative_to(_HERE.parent).parts)
    for path in sorted(folder.glob("*.py")):
        if path.stem[0] != "_" and 'if __name__ == "__main__"' in path.read_text():
            yield f"{package}.{path.stem}", _first_line(path)
    for path in sorted(folder.glob("*/__main__.py")):
        yield f"{package}.{path.parent.name}", _first_line(path.parent / "__init__.py")


def _configs() -> Iterator[tuple[str, str]]:
    """The files that make a config, rather than hold what others share."""
    for path in sorted(_CONFIGS.glob("*.py")):
        functions = [
            n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)
        ]
        if "get_config" in functions:
            yield f"configs/{path.name}", _first_line(path)


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    begun()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever read the list has seen enough
    raise SystemExit(main())
