"""Runs scripts as they stand on real ranks, which are forked from a process that has imported torch (tests/zygote.py).

Each rank has torchrun's variables; the ranks of a script meet at a port of their own.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.zygote import Forked, fork

# Of a rank that fails the others may only say that it is gone. It has this long to say more.
GRACE = 2.0


@dataclass(frozen=True)
class Ran:
    """What became of a script: the output of all ranks together, and what the first that failed wrote besides."""

    output: str
    error: str | None


def run_scripts(
    scripts: list[Path],
    *,
    ranks: int,
    folder: Path,
    arguments: list[str] | None = None,
    timeout: float = 100,
    preload: tuple[str, ...] = (),
) -> dict[Path, Ran]:
    """Run them on `ranks` ranks, or for 0 in a plain process without a launcher's variables.

    `preload` names further modules that are imported once for all of them.
    """
    return {script: _run(script, ranks, folder, arguments or [], timeout, preload) for script in scripts}


def _run(script: Path, ranks: int, folder: Path, arguments: list[str], timeout: float, preload: tuple[str, ...]) -> Ran:
    port = free_port()
    with contextlib.ExitStack() as files:
        outputs, errors = (
            [files.enter_context(tempfile.TemporaryFile()) for _ in range(max(ranks, 1))] for _ in range(2)
        )
        processes = [
            fork(
                "tests.nursery:as_python",
                [str(script), *arguments],
                output=output,
                errors=error,
                variables=os.environ | {"OMP_NUM_THREADS": "1"} | _variables(rank, ranks, port),
                folder=folder,
                imports=preload,
            )
            for rank, (output, error) in enumerate(zip(outputs, errors, strict=True))
        ]
        codes = _wait(processes, timeout)
        wrote = []
        for file in (*outputs, *errors):
            file.seek(0)
            wrote.append(file.read().decode(errors="replace"))
    failed = [rank for rank, code in enumerate(codes) if code]
    error = f"rank {failed[0]} ended with {codes[failed[0]]}\n{wrote[len(codes) + failed[0]]}" if failed else None
    return Ran(output="".join(wrote[: len(codes)]), error=error)


def _wait(processes: list[Forked], timeout: float) -> list[int]:
    """Their exit codes; those that do not end in time, or soon after the first failure, are ended."""
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill_all()
    return [process.wait() for process in processes]


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    if not ranks:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def clean_environment() -> dict[str, str]:
    """Without what a launcher, or the Python that runs the tests, has put there."""
    left_out = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "WORLD_SIZE", "LOCAL_RANK"}
    left_out |= {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def in_new_interpreters(
    *arguments: str, folder: Path, python: str = sys.executable, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """`gradsync run`, not forked: what counts is what a Python does when it starts, and how it finds its packages."""
    process = subprocess.Popen(
        [python, "-m", "gradsync", "run", *arguments],
        cwd=folder,
        env=clean_environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=150)
    finally:
        # Also of the ranks that the script has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)
