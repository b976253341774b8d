"""Errors for people: launchers print their one sentence and exit with code 2."""

import importlib
from typing import Any


class TrainError(Exception):
    """Condition under which training cannot start or continue."""


class WorkdirMismatch(TrainError):
    """Work directory of another config."""


class WorkdirBusy(TrainError):
    """Work directory in which another process is training."""


class NonFiniteLoss(TrainError):
    """Loss or gradient that became NaN or infinite."""


class CheckpointError(TrainError):
    """Checkpoint that could not be written, found or read."""


class MissingPackage(TrainError):
    """Optional package that is not installed."""


class JoinError(TrainError):
    """Processes of one run that did not find each other."""


def optional(module: str, said: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        MissingPackage: it is not installed; ``said`` is the message.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPackage(said) from None
