"""What the tests of the command line share."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradsync.tools.cli import main

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _outside_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER_VARIABLES, "GLOO_SOCKET_IFNAME", "GRADSYNC_DEBUG"):
        # Set first, so that what the code under test sets is taken back as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of the size that the test is parametrized with, as mount writes it."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, timeout=20).returncode != 0:
        pytest.skip("needs to be root to mount a small disk")
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=20)


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
