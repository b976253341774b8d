"""How a checkpoint gets on disk or into a store: marked as unsealed, written, sealed, unmarked.

The one thing to know: STEP.unsealed beside a folder STEP says that the folder is not whole, from before
its first byte until after its seal, and again while it is removed. A store has no renames by which a
folder could get its name when it is complete; a mark does the same for both.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orbax.checkpoint import v1 as ocp

from crossattn.train import processes, storage
from crossattn.train.checkpoint_files import UNSEALED, context, seal
from crossattn.train.storage import Folder


class Writing:
    """A checkpoint on its way to the disk, in the background.

    trees: what Orbax writes, record: the JSON beside it; superfluous: the steps whose checkpoints
    go once this one is there; before_seal: is called, and may refuse, when all its files are there.
    All processes make one; process 0 marks, seals and removes.
    """

    def __init__(
        self,
        directory: Folder,
        step: int,
        trees: Mapping[str, Any],
        record: Mapping[str, Any],
        superfluous: Sequence[int],
        before_seal: Callable[[], None],
    ):
        self.step = step
        self._folder = directory / str(step)
        self._superfluous = [directory / str(each) for each in superfluous]
        self._before_seal = before_seal
        if processes.is_main():
            _mark(self._folder).write_bytes(b"")
        with context(directory):
            self._response = ocp.save_checkpointables_async(
                self._folder,  # pyright: ignore[reportArgumentType]
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
                self._before_seal()
                seal(self._folder)
                storage.delete(_mark(self._folder))
                for folder in self._superfluous:
                    remove(folder)
        except BaseException as error:  # Raised by `result`, in the thread that asks.
            self._error = error


def remove(folder: Folder) -> None:
    """Deletes a checkpoint; killed halfway, it leaves nothing that looks like one."""
    _mark(folder).write_bytes(b"")
    storage.delete(folder)
    storage.delete(_mark(folder))


def clean_up(directory: Folder) -> None:
    """Deletes what was left half written or half removed."""
    for name in storage.names(directory):
        if "orbax-checkpoint-tmp" in name:
            storage.delete(directory / name)
    for name in storage.names(directory):
        if name.endswith(UNSEALED):
            storage.delete(directory / name.removesuffix(UNSEALED))
            storage.delete(directory / name)


def _mark(folder: Folder) -> Folder:
    return folder.with_name(folder.name + UNSEALED)
