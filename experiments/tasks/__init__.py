"""What can be trained: a task joins a model, a data source and a way to score it."""

from pathlib import Path
from typing import Any

from experiments.settings import SettingsError
from experiments.tasks.corpus import Corpus
from experiments.tasks.denoising import DenoisingTask
from experiments.tasks.language_model import LanguageModelTask
from experiments.tasks.translation import TranslationTask

TASKS = {
    "translation": TranslationTask,
    "language_model": LanguageModelTask,
    "denoising": DenoisingTask,
}


def make_task(
    config: Any, assets: Path | None = None, corpus: Corpus | None = None
) -> TranslationTask | LanguageModelTask | DenoisingTask:
    """The task that ``config.task`` names.

    Args:
      config: an ``ml_collections.ConfigDict``.
      assets: folder of a run with its tokenizers; without it (or while it is empty) they are trained.
      corpus: takes the place of the config's own.

    Raises:
      SettingsError: there is no such task.
    """
    if config.task not in TASKS:
        known = ", ".join(TASKS)
        raise SettingsError(f"config.task is {config.task!r}; expected one of {known}.")
    return TASKS[config.task](config, assets, corpus)
