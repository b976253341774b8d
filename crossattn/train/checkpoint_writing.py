"""How a checkpoint gets on disk: written under another name, sealed, and only then named.

The one thing to know: a folder that bears a step's number is complete and sealed at any moment,
and what is removed loses its number first; whatever a killed run left half done has another name.
"""

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from crossattn.train import processes
from crossattn.train.checkpoint_files import context, seal

_UNSEALED = ".unsealed"
_REMOVED = ".removed"


class Writing:
    """A checkpoint on its way to the disk, in the background.

    trees: what Orbax writes, record: the JSON beside it; superfluous: the steps whose checkpoints
    go once this one is there. All processes make one; process 0 seals, names and removes.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        trees: Mapping[str, Any],
        record: Mapping[str, Any],
        superfluous: Sequence[int],
    ):
        self.step = step
        self._final = directory / str(step)
        self._unsealed = directory / f"{step}{_UNSEALED}"
        self._superfluous = [directory / str(each) for each in superfluous]
        with context():
            self._response = ocp.save_checkpointables_async(
                self._unsealed,  # pyright: ignore[reportArgumentType]
                dict(trees),
                custom_metadata=dict(record),
            )
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._finish, name=f"checkpoint {step}")
        self._thread.start()

    def result(self) -> None:
        """Waits until it is on disk; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        try:
            # Orbax gives its thread and descriptors back only to who asks for the result.
            self._response.result()
            if processes.is_main():
                seal(self._unsealed)
                os.rename(self._unsealed, self._final)
                for folder in self._superfluous:
                    remove(folder)
        except BaseException as error:  # Raised by `result`, in the thread that asks.
            self._error = error


def remove(folder: Path) -> None:
    """Deletes a checkpoint; killed halfway, it leaves nothing that looks like one."""
    removed = folder.with_name(folder.name + _REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def clean_up(directory: Path) -> None:
    """Deletes what was left half written or half removed."""
    for pattern in ("*orbax-checkpoint-tmp*", f"*{_UNSEALED}", f"*{_REMOVED}"):
        for unfinished in directory.glob(pattern):
            shutil.rmtree(unfinished, ignore_errors=True)
