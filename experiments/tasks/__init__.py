"""What can be trained: a task joins a model, a data source and a way to score it."""

from typing import Any

from crossattn.train.storage import Folder
from experiments.settings import SettingsError
from experiments.tasks.denoising import DenoisingTask
from experiments.tasks.language_model import LanguageModelTask
from experiments.tasks.translation import TranslationTask

TASKS = {
    "translation": TranslationTask,
    "language_model": LanguageModelTask,
    "denoising": DenoisingTask,
}


def make_task(
    config: Any, assets: Folder | None = None
) -> TranslationTask | LanguageModelTask | DenoisingTask:
    """The task that ``config.task`` names.

    Args:
      config: an ``ml_collections.ConfigDict``.
      assets: folder of a run with its tokenizers; without it (or while it is empty) they are trained.

    Raises:
      SettingsError: there is no such task.
    """
    if config.task not in TASKS:
        known = ", ".join(TASKS)
        raise SettingsError(f"config.task is {config.task!r}; expected one of {known}.")
    return TASKS[config.task](config, assets)
