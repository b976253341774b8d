"""Tasks: each joins a model, data and a way to score it.

A name finds its file: "language_model" is ``language_model.py`` here, with ``LanguageModelTask``; a name with
a dot, "mine.captioning", is a module of your own on the import path.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from crossattn.train.storage import Folder
from experiments.errors import SettingsError


def known() -> list[str]:
    """The names of the tasks that there are here; files without a task's class are parts of others."""
    names = [module.name for path in __path__ for module in pkgutil.iter_modules([path])]
    return sorted(name for name in names if _has_task(name))


def find(name: Any) -> type[Any]:
    """The class of the task that ``config.task`` names, a ``base.Task``.

    Raises:
      SettingsError: there is none; the message lists those that there are.
    """
    parts = name.split(".") if isinstance(name, str) else []
    inside = len(parts) == 1
    if not all(part.isidentifier() for part in parts) or (len(parts) < 2 and name not in known()):
        raise SettingsError(
            f"config.task is {name!r}; expected one of {', '.join(known())}, or a module of your own with a"
            " dot in its name."
        )
    try:
        module = importlib.import_module(f"{__name__}.{name}" if inside else name)
    except ImportError as error:
        raise SettingsError(
            f"config.task is {name!r}, which cannot be imported ({error})."
        ) from error
    title = _title(name)
    if not hasattr(module, title):
        raise SettingsError(f"config.task is {name!r}, but {module.__name__} has no class {title}.")
    return getattr(module, title)


def make_task(config: Any, assets: Folder | None = None) -> Any:
    """The task that ``config.task`` names.

    Args:
      config: an ``ml_collections.ConfigDict``.
      assets: folder of a run with its tokenizers; without it (or while it is empty) they are trained.

    Raises:
      SettingsError: there is no such task.
    """
    return find(config.task)(config, assets)


def _title(name: str) -> str:
    """The class of a file: "LanguageModelTask" of "language_model"."""
    return "".join(part.capitalize() for part in name.rpartition(".")[2].split("_")) + "Task"


def _has_task(name: str) -> bool:
    files = (Path(path) / f"{name}.py" for path in __path__)
    line = f"class {_title(name)}("
    return any(f.exists() and line in f.read_text(encoding="utf-8") for f in files)
