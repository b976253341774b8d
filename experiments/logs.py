"""What other libraries have to say about their errors: in ``log.txt`` of the run, not on the screen.

A launcher ends with one sentence; the stack of where it came from is for whoever
mends it, and is in the file.
"""

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
    """Notes go to stderr, a line each; stacks, once the folder is there, to its ``log.txt``.

    In a process of its own a launcher also catches what threads and finalisers would print.
    """
    screen = logging.StreamHandler()
    screen.setFormatter(_OneLine())
    screen.addFilter(lambda record: record.name != __name__)
    handlers: list[logging.Handler] = [screen]
    absl = logging.getLogger("absl")
    for old in [each for each in absl.filters if isinstance(each, _Keeper)]:
        absl.removeFilter(old)
    if workdir and "://" not in workdir:  # a store has no files that grow
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
    """Errors that nobody waits for: logged, where Python would print them."""

    def of_thread(failed: Any) -> None:
        _LOG.error("in the thread %s", failed.thread, exc_info=failed.exc_value)

    def of_finaliser(failed: Any) -> None:
        _LOG.error("in %r", failed.object, exc_info=failed.exc_value)

    threading.excepthook, sys.unraisablehook = of_thread, of_finaliser


def keep(error: BaseException) -> None:
    """The stack of an error, with the one that it came from, into the file."""
    if error.__cause__ is not None or (error.__context__ and not error.__suppress_context__):
        _LOG.error("%s", type(error).__name__, exc_info=error)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in _OURS


class _OneLine(logging.Formatter):
    """``note: MESSAGE`` without its stack and its line breaks."""

    def format(self, record: logging.LogRecord) -> str:
        return f"note: {' '.join(record.getMessage().split())}"


class _File(logging.Handler):
    """Appends to ``log.txt`` in a folder, if there is such a folder; never complains itself."""

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
    """Writes errors down before filters that come after it drop them."""

    def __init__(self, file: logging.Handler):
        super().__init__()
        self._file = file

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and record.exc_info:
            self._file.emit(record)
        return True
