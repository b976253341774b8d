"""Launchers started in this process, as in the tests of the launchers."""

from tests.experiments.conftest import _keep_compiled_code, launched, refused  # noqa: F401
