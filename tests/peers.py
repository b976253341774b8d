"""Libraries that results are compared with, where they are installed.

They are large, so ``make test`` goes without them and compares with files that they
made; ``pip install 'crossattn[bench]'`` brings them, and continuous integration runs these tests beside them.
"""

from typing import Any

import pytest


def peer(module: str) -> Any:
    """The module; the test is skipped, with the line that installs it, where it is not there."""
    name = module.partition(".")[0]
    package = "openai-whisper" if name == "whisper" else "'crossattn[bench]'"
    return pytest.importorskip(module, reason=f"compares with {name} itself: pip install {package}")


def package(module: str, extra: str) -> Any:
    """A module that an extra of this package brings; the test is skipped, with the line, without it."""
    return pytest.importorskip(
        module, reason=f"{module} is not installed: pip install 'crossattn[{extra}]'"
    )
