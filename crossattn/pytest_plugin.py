"""``pytest --attention=package.module:function``: the conformance suite on any attention function.

pytest loads this file wherever crossattn is installed, so it imports nothing without the option.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: "pytest.Parser") -> None:
    """Adds the options."""
    group = parser.getgroup("attention", "conformance of an attention function")
    group.addoption(
        "--attention",
        metavar="MODULE:FUNCTION",
        help="test every promise of this function, of the signature of crossattn.attend or a part of it",
    )
    group.addoption("--attention-quick", action="store_true", help="one case of each kind")


def pytest_configure(config: "pytest.Config") -> None:
    """Adds the tests of the conformance suite, if the option is given."""
    if config.getoption("attention"):
        from crossattn.testing import as_tests

        config.pluginmanager.register(as_tests, "crossattn-promises")
        if config.args_source != config.ArgsSource.ARGS:
            config.args = []  # without paths on the command line, only the suite runs
