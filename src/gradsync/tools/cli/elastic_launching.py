"""Starts elastic ranks on this node and replaces those that are lost, while the others go on.

The launcher of a node holds torchft's lighthouse, unless ``TORCHFT_LIGHTHOUSE`` says where one is: then several nodes
have one in common, and each replaces its own ranks. When one rank has finished, the run is over: who takes part ends
by itself, and who is on its way in is not needed any more.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from gradsync.base.environment import LOOPBACK
from gradsync.base.errors import ConfigurationError
from gradsync.health.elastic import LIGHTHOUSE, Elastic, Lighthouse
from gradsync.tools.cli.failure_message import WRONG_USE
from gradsync.tools.cli.launching import GRACE_SECONDS, RANK_PROGRAM
from gradsync.tools.launch import RESTART_COUNT, Failure, RankPlace, RankProcesses, standalone

__all__ = ["run_elastic_ranks_of"]

# A rank that fails for a reason of its own would fail for ever.
MOST_REPLACED = 1000
# With an error of its own, so soon after its start, it has done nothing. Three in a row, and it is no accident.
HOPELESS_SECONDS, HOPELESS = 20.0, 3
SIGNAL_BASE = 128


def run_elastic_ranks_of(module: str, arguments: list[str], *, nproc: int, ranks: int, min_ranks: int) -> int:
    """Run ``nproc`` ranks of ``python -m module arguments`` here, of ``ranks`` on all nodes; returns the exit code.

    It is 0 when ranks have ended with 0. A rank that fails or is killed is started again; SIGINT, SIGTERM and SIGHUP go
    to all of them, and end the run.
    """
    if ranks < nproc:
        raise ConfigurationError(f"--elastic-ranks is {ranks}, but {nproc} ranks are started on this node alone")
    if min_ranks > ranks:
        raise ConfigurationError(f"--min-ranks is {min_ranks}, but there are to be only {ranks} ranks at the beginning")
    with _lighthouse(min_ranks) as address, standalone(nproc) as places, RankProcesses(GRACE_SECONDS) as processes:
        more = {LIGHTHOUSE: address, "WORLD_SIZE": str(ranks)}
        here = [replace(place, more={**place.more, **more}) for place in places]
        command = [sys.executable, "-c", RANK_PROGRAM, module, *arguments]
        return _Crew(processes=processes, command=command).run(here)


@contextmanager
def _lighthouse(min_ranks: int) -> Iterator[str]:
    given = os.environ.get(LIGHTHOUSE)
    if given:
        yield given
        return
    lighthouse = Lighthouse(LOOPBACK, min_ranks=min_ranks, join_seconds=Elastic().timeout)
    try:
        yield lighthouse.address
    finally:
        lighthouse.close()


@dataclass(kw_only=True)
class _Crew:
    """The ranks of this node."""

    processes: RankProcesses
    command: list[str]
    replaced: int = 0
    hopeless: int = 0

    def run(self, places: list[RankPlace]) -> int:
        began: dict[int, float] = {}
        with self.processes.noting_signals():
            for place in places:
                self._start(place, began)
            finished: float | None = None
            while self.processes.count and not self.processes.signals:
                for place, code in self.processes.take_ended(1.0):
                    if code == 0:
                        finished = finished or time.monotonic()
                    elif finished is None:
                        failure = Failure(place=place, code=code)
                        if not self._may_replace(failure, time.monotonic() - began[place.rank]):
                            self.processes.stop()
                            return failure.exit_code
                        self._start(_again(place, self.replaced), began)
                if finished is not None and time.monotonic() - finished > GRACE_SECONDS:
                    break
            return self._end(finished)

    def _start(self, place: RankPlace, began: dict[int, float]) -> None:
        began[place.rank] = time.monotonic()
        self.processes.start(place, partial(os.execv, sys.executable, self.command))

    def _may_replace(self, failure: Failure, lived: float) -> bool:
        if failure.code == WRONG_USE:
            return False
        self.hopeless = self.hopeless + 1 if failure.code > 0 and lived < HOPELESS_SECONDS else 0
        if self.hopeless >= HOPELESS:
            _say(f"{failure}; {self.hopeless} ranks in a row have failed soon after their start, so the run ends")
            return False
        if self.replaced >= MOST_REPLACED:
            _say(f"{failure}; {self.replaced} ranks have been replaced in this run, so it ends")
            return False
        self.replaced += 1
        _say(f"{failure}; the others go on, and it is started again")
        return True

    def _end(self, finished: float | None) -> int:
        signals = self.processes.signals
        self.processes.stop(signals[0] if signals else signal.SIGTERM)
        if finished is not None:
            return 0
        failure = self.processes.failure()
        if signals:
            return SIGNAL_BASE + signals[0] if failure is None else failure.exit_code
        return 0 if failure is None else failure.exit_code


def _again(place: RankPlace, count: int) -> RankPlace:
    return replace(place, more={**place.more, RESTART_COUNT: str(count)})


def _say(line: str) -> None:
    print(f"gradsync: {line}", file=sys.stderr, flush=True)
