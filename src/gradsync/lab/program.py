"""Runs ranks at their places: a function in each, or a program, of which rank 0's output is shown."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import IO

from gradsync.errors import ConfigurationError
from gradsync.lab.errors import LabError
from gradsync.lab.host import GLOO_INTERFACE
from gradsync.launch import Failure, Place, RankProcesses, become, signals_raise

__all__ = ["run_at", "run_program"]

# Lines shown of a rank that failed.
TAIL_LINES = 40
TAIL_BYTES = 64 * 1024
# What a user may choose of the variables of a rank: threads and interface, not who it is.
CHOSEN = ("OMP_NUM_THREADS", GLOO_INTERFACE)


def run_at(places: Sequence[Place], action: Callable[[Place], object], timeout: float) -> Failure | None:
    """``action(place)`` in a process at each place. The rank that failed first, if one did; none runs any more."""
    with signals_raise(), RankProcesses() as ranks:
        for place in places:
            ranks.start(place, partial(action, place))
        try:
            return ranks.wait(timeout)
        except TimeoutError as error:
            raise LabError(f"{error}. They were ended; allow more time?") from None


def run_program(places: Sequence[Place], command: Sequence[str], *, env: Mapping[str, str], timeout: float) -> int:
    """Run ``command`` at each place; the exit code is 0, or that of the rank that failed first."""
    path = _found(command, env.get("PATH", os.environ.get("PATH", os.defpath)))
    with ExitStack() as stack:
        # Kept until one fails. Without a name, so that no kill leaves one behind.
        outputs = {place.rank: stack.enter_context(tempfile.TemporaryFile()) for place in places[1:]}

        def work(place: Place) -> None:
            fixed = place.variables.keys() - CHOSEN
            os.environ.update({name: value for name, value in env.items() if name not in fixed})
            output = outputs.get(place.rank)
            become(path, list(command), output, output)

        failure = run_at(places, work, timeout)
        if failure is None:
            return 0
        if failure.place.rank in outputs:
            _show(failure, outputs[failure.place.rank])
    others = "; the others were ended" if len(places) > 1 else ""
    print(f"gradsync: {failure}{others}", file=sys.stderr, flush=True)
    return failure.exit_code


def _found(command: Sequence[str], searched: str) -> str:
    if not command:
        raise ConfigurationError("there is no command to run. Give one after --, as in: gradsync lab run -- hostname")
    path = shutil.which(command[0], path=searched)
    if path is None:
        raise ConfigurationError(f"the command {command[0]} is neither a program in PATH nor a file that can be run")
    return path


def _show(failure: Failure, output: IO[bytes]) -> None:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - TAIL_BYTES))
    for line in output.read().decode(errors="replace").splitlines()[-TAIL_LINES:]:
        print(f"[rank {failure.place.rank}] {line}", file=sys.stderr)
