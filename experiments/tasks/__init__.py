"""Tasks: a task joins a model, data and scores.

The name "language_model" is ``language_model.py`` here, with ``LanguageModelTask``; a name with a dot,
"mine.captioning", is a module of your own on the import path.
"""

import importlib
from pathlib import Path
from typing import Any

from crossattn.train.storage import Folder
from experiments.errors import SettingsError


def known() -> list[str]:
    """Returns the names of the tasks in this package."""
    files = (path for folder in __path__ for path in Path(folder).glob("*.py"))
    return sorted(path.stem for path in files if _has_task(path))


def find(name: Any) -> type[Any]:
    """Returns the class of the task that ``config.task`` names, a ``base.Task``.

    Raises:
      SettingsError: there is no such task; the message lists the known ones.
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
    """Returns the task of a config; ``base.Task`` has the arguments.

    Raises:
      SettingsError: there is no such task, or a task without a memory is to be blind.
    """
    task = find(config.task)(config, assets)
    if config.data.get("blind", False) and not task.memory:
        raise SettingsError(
            f"config.data.blind is True, but the model of this {config.task} reads no memory; leave it False."
        )
    return task


def _title(name: str) -> str:
    """Returns the class of a file: "LanguageModelTask" of "language_model"."""
    return "".join(part.capitalize() for part in name.rpartition(".")[2].split("_")) + "Task"


def _has_task(path: Path) -> bool:
    return f"class {_title(path.stem)}(" in path.read_text(encoding="utf-8")
