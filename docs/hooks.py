"""Hooks of MkDocs: the pages of the reference, links to files of the repository, and players of sounds.

The reference lists the public names of ``crossattn``, so an added or moved name needs no change here. A
public name without a docstring is a warning, and ``mkdocs build --strict`` fails at warnings.
"""

import importlib
import inspect
import logging
import pkgutil
import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import crossattn

ROOT = Path(__file__).parents[1]
# ``crossattn`` itself exports its public names; the others serve the kernels.
_INSIDE = {"ops"}
_WARNINGS = logging.getLogger("mkdocs.hooks.docs")
_SOUND = re.compile(r'<a href="([^":]+\.(?:flac|ogg|wav))">(.*?)</a>', re.DOTALL)
_LINK = re.compile(r"(\]\()(\.\./[^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Adds the repository's address in pyproject.toml, and the reference to the navigation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"]["Repository"]
    config.repo_name = project["name"]
    config.nav.append({"Reference": [{title: path} for title, path, _ in reference()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each public module of ``crossattn``, and one for its own names."""
    from mkdocs.structure.files import File

    for _, path, content in reference():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links out of the docs folder to the repository; a missing target is a warning."""

    def to_repository(link: re.Match) -> str:
        path = posixpath.normpath(posixpath.join("docs", page.file.src_dir, link[2]))
        if not (ROOT / path).exists():
            _WARNINGS.warning("%s links to %s, which is not there", page.file.src_path, link[2])
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{link[1]}{config.repo_url}/{kind}/main/{path}{link[3] or ''})"

    return _LINK.sub(to_repository, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Puts a player in the place of each link to a sound, under the words of the link."""
    player = r'<span class="sound">\2<br><audio controls preload="none" src="\1"></audio></span>'
    return _SOUND.sub(player, html)


def reference() -> list[tuple[str, str, str]]:
    """Returns title, path and Markdown of each page of the reference."""
    named = {name: getattr(crossattn, name) for name in crossattn.__all__ if name[0] != "_"}
    pages, placed = [], set()
    for name, module in named.items():
        if not isinstance(module, ModuleType) or name in _INSIDE:
            continue
        parts = list(_rendered(module, placed))
        if parts:
            about = f"# crossattn.{name}\n\n{_about(module)}\n\n"
            pages.append((name, f"api/{name}.md", about + "\n".join(parts)))
    own = [
        _directive(value, 2)
        for value in named.values()
        if not isinstance(value, ModuleType) and _path(value) not in placed
    ]
    head = f"# crossattn\n\n{_about(crossattn)}\n\n"
    return [("crossattn", "api/index.md", head + "\n".join(own)), *pages]


def _rendered(module: ModuleType, placed: set, level: int = 2) -> Iterator[str]:
    """Yields the directives of a module's public names, each object on the first page that has it."""
    for name, value in _public(module):
        if isinstance(value, ModuleType):
            inside = list(_rendered(value, placed, level + 1))
            if inside:
                yield f"{'#' * level} {module.__name__.partition('.')[2]}.{name}\n\n{_about(value)}\n"
                yield from inside
        elif _is_ours(value) and _path(value) not in placed:
            placed.add(_path(value))
            _complain_where_undocumented(value)
            yield _directive(value, level)


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields the names of ``__all__``; without it, the module's own definitions, or its submodules."""
    names = getattr(module, "__all__", None)
    if names is None and hasattr(module, "__path__"):
        names = [found.name for found in pkgutil.iter_modules(module.__path__)]
        for name in names:
            importlib.import_module(f"{module.__name__}.{name}")
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
        ]
    for name in names:
        yield name, getattr(module, name)


def _directive(value: Any, level: int) -> str:
    return f"::: {_path(value)}\n    options:\n      heading_level: {level}\n"


def _is_ours(value: Any) -> bool:
    """Returns whether the value is a class or a function of this package, not an alias of a type."""
    return hasattr(value, "__qualname__") and value.__module__.startswith("crossattn")


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _about(module: ModuleType) -> str:
    """Formats a module's docstring as Markdown: ``::`` before an indented block becomes a colon."""
    return re.sub(r"::$", ":", inspect.getdoc(module) or "", flags=re.MULTILINE)


def _complain_where_undocumented(value: Any) -> None:
    """Warns of a public name or method without a docstring.

    A method may have its docstring in a parent class or in another class of the module.
    """
    text = value.__doc__ or ""
    # A dataclass without a docstring gets its signature.
    wanting = [value] if not text or text.startswith(f"{value.__name__}(") else []
    if inspect.isclass(value):
        beside = [c for c in vars(inspect.getmodule(value)).values() if inspect.isclass(c)]
        for name, method in vars(value).items():
            if name[0] == "_" or getattr(method, "__name__", None) != name:
                continue
            if not any(inspect.getdoc(getattr(each, name, None)) for each in [value, *beside]):
                wanting.append(getattr(value, name))
    for each in wanting:
        _WARNINGS.warning("%s is public and has no docstring", _path(each))
