"""``pytest --attention=package.module:function``: the conformance suite on any attention function.

pytest loads this file wherever crossattn is installed, so it imports nothing before the option is given.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: "pytest.Parser") -> None:
    """Adds the options."""
    group = parser.getgroup("attention", "what an attention function promises")
    group.addoption(
        "--attention",
        metavar="MODULE:FUNCTION",
        help="hold this function, of the signature of crossattn.attend or a part of it, to every promise",
    )
    group.addoption("--attention-quick", action="store_true", help="one case of each kind")


def pytest_configure(config: "pytest.Config") -> None:
    """Makes the promises tests where the option is given."""
    if config.getoption("attention"):
        from crossattn.testing import as_tests

        config.pluginmanager.register(as_tests, "crossattn-promises")
        if config.args_source != config.ArgsSource.ARGS:
            config.args = []  # without paths on the command line, the suite alone is run
