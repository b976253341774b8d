"""s3:// for Orbax, which has tensorstore write to folders and to gs:// only.

The one thing to know: tensorstore itself speaks to S3; three functions of Orbax, which say where the
arrays of a checkpoint lie, are replaced by ones that also know s3:// and hand on everything else.
"""

import importlib.metadata
import os
from typing import Any

from etils import epath
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from crossattn.train.errors import TrainError

_SCHEME = "s3://"


def install() -> None:
    """Lets Orbax write to s3:// and read from it; once in a process, and nothing else changes.

    Raises:
        TrainError: this version of Orbax is made otherwise.
    """
    places = (
        (tensorstore_utils, "_use_gcs_driver", _is_store),
        (tensorstore_utils, "_normalize_path", _normalized),
        (gcs_utils, "get_kvstore_for_gcs", _kvstore),
    )
    for module, name, make in places:
        before = getattr(module, name, None)
        if before is None:
            version = importlib.metadata.version("orbax-checkpoint")
            raise TrainError(
                f"work directories in s3:// need orbax-checkpoint 0.12.8, not {version}, which has no"
                f" {name}: install that one, or train into gs:// or a folder of this machine"
            )
        if getattr(before, "__module__", "") != __name__:
            setattr(module, name, make(before))


def _is_store(before: Any):
    return lambda directory: directory.startswith(_SCHEME) or before(directory)


def _normalized(before: Any):
    def normalized(path: str) -> str:
        if not path.startswith(_SCHEME):
            return before(path)
        return _SCHEME + os.path.normpath(path.removeprefix(_SCHEME))

    return normalized


def _kvstore(before: Any):
    # Late: storage.py asks for this file.
    from crossattn.train.storage import kvstore

    return lambda path: kvstore(epath.Path(path)) if path.startswith(_SCHEME) else before(path)
