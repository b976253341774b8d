"""Logging: notes on the screen, a line each, and stacks of errors in ``log.txt`` of the run."""

import logging
import sys
import threading
from pathlib import Path
from typing import Any

FILE = "log.txt"
_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"
_OURS = ("crossattn", "experiments")
_LOG = logging.getLogger(__name__)


def begin(workdir: str | None, own_process: bool) -> None:
    """Logs notes to stderr, and stacks to ``log.txt`` of the folder, once it exists.

    A launcher in a process of its own also logs the errors of threads and finalisers.
    """
    screen = logging.StreamHandler()
    screen.setFormatter(_OneLine())
    screen.addFilter(lambda record: record.name != __name__)
    handlers: list[logging.Handler] = [screen]
    absl = logging.getLogger("absl")
    for old in [each for each in absl.filters if isinstance(each, _Keeper)]:
        absl.removeFilter(old)
    if workdir and "://" not in workdir:  # stores cannot append
        file = _File(Path(workdir))
        handlers.append(file)
        screen.addFilter(lambda record: _is_ours(record) or not record.exc_info)
        absl.addFilter(_Keeper(file))
        if own_process:
            logging.captureWarnings(True)
            screen.addFilter(lambda record: "was never awaited" not in record.getMessage())
            _catch_strays()
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)


def _catch_strays() -> None:
    def of_thread(failed: Any) -> None:
        _LOG.error("in the thread %s", failed.thread, exc_info=failed.exc_value)

    def of_finaliser(failed: Any) -> None:
        _LOG.error("in %r", failed.object, exc_info=failed.exc_value)

    threading.excepthook, sys.unraisablehook = of_thread, of_finaliser


def keep(error: BaseException) -> None:
    """Logs the stack of an error that has a cause."""
    if error.__cause__ is not None or (error.__context__ and not error.__suppress_context__):
        _LOG.error("%s", type(error).__name__, exc_info=error)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in _OURS


class _OneLine(logging.Formatter):
    """A formatter without stacks and line breaks."""

    def format(self, record: logging.LogRecord) -> str:
        return f"note: {' '.join(record.getMessage().split())}"


class _File(logging.Handler):
    """A handler that appends to ``log.txt`` of a folder, if it exists, and raises nothing."""

    def __init__(self, folder: Path):
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter(_FORMAT))
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_kept", False):
            return
        try:
            if not self._folder.is_dir():
                return
            record.is_kept = True
            with (self._folder / FILE).open(
                "a", encoding="utf-8", errors="backslashreplace"
            ) as file:
                file.write(self.format(record) + "\n")
        except OSError:
            return


class _Keeper(logging.Filter):
    """A filter that logs errors before later filters drop them."""

    def __init__(self, file: logging.Handler):
        super().__init__()
        self._file = file

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and record.exc_info:
            self._file.emit(record)
        return True
