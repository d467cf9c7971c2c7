"""What the tests of the command line share."""

import sys
from collections.abc import Callable

import pytest

from gradsync.tools.cli import main

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _outside_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER_VARIABLES, "GRADSYNC_DEBUG"):
        # Set first, so that what the code under test sets is taken back as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command ``gradsync`` with these arguments, in this process; returns its exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gradsync", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main.main()
        assert isinstance(exit_info.value.code, int)
        return exit_info.value.code

    return run
