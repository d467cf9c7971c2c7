"""Runs a program as ranks: one process each, rank 0's output shown, the others' kept until one fails."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import IO

from gradsync.errors import ConfigurationError
from gradsync.lab.ranks import Failure, Place, RankProcesses, signals_raise

__all__ = ["run_program"]

# Lines shown of a rank that failed.
TAIL_LINES = 40
TAIL_BYTES = 64 * 1024
# Of a launcher above this process: the ranks meet at a place of their own.
NOT_PASSED_ON = "TORCHELASTIC_"


def run_program(places: Sequence[Place], command: Sequence[str], *, env: Mapping[str, str], timeout: float) -> int:
    """Run ``command`` at each place; the exit code is 0, or that of the rank that failed first."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)} | dict(env)
    path = _found(command, variables)
    with ExitStack() as stack:
        # Without a name, so that no kill leaves one behind.
        outputs = {place.rank: stack.enter_context(tempfile.TemporaryFile()) for place in places[1:]}
        stack.enter_context(signals_raise())
        with RankProcesses() as ranks:
            for place in places:
                chosen = {**place.variables, **_kept(env)}
                output = outputs.get(place.rank)
                ranks.start(place, partial(_become, path, list(command), variables | chosen, output))
            failure = ranks.wait(timeout)
        if failure is None:
            return 0
        if failure.place.rank in outputs:
            _show(failure, outputs[failure.place.rank])
        others = "; the others were ended" if len(places) > 1 else ""
        print(f"gradsync: {failure}{others}", file=sys.stderr, flush=True)
        return failure.exit_code


def _kept(env: Mapping[str, str]) -> dict[str, str]:
    """What a user may choose of the variables of a rank: threads and interface, not who it is."""
    return {name: env[name] for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME") if name in env}


def _found(command: Sequence[str], variables: Mapping[str, str]) -> str:
    if not command:
        raise ConfigurationError("there is no command to run. Give one after --, as in: gradsync lab run -- hostname")
    path = shutil.which(command[0], path=variables.get("PATH", os.defpath))
    if path is None:
        raise ConfigurationError(f"the command {command[0]} is neither a program in PATH nor a file that can be run")
    return path


def _become(path: str, command: list[str], variables: dict[str, str], output: IO[bytes] | None) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if output is not None:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # Python ignores it, other programs do not expect that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(path, command, variables)


def _show(failure: Failure, output: IO[bytes]) -> None:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - TAIL_BYTES))
    for line in output.read().decode(errors="replace").splitlines()[-TAIL_LINES:]:
        print(f"[rank {failure.place.rank}] {line}", file=sys.stderr)
