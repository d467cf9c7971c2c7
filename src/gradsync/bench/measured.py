"""Scenarios that are measured in ranks of the benchmark's own: the usual kind."""

import logging
import os
import warnings
from abc import abstractmethod
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from gradsync.bench.measure import Progress, Rounds
from gradsync.bench.record import Cell, RowFile
from gradsync.bench.scenario import Scenario
from gradsync.lab import Lab, read_counters
from gradsync.lab.lab import fork_ranks

__all__ = ["MeasuredScenario"]

WIRE_TIMEOUT = timedelta(seconds=120)
# A cell may take this many times as long as it should, and some more, before it counts as hung.
PATIENCE, GRACE = 5, 120.0


class MeasuredScenario(Scenario):
    """One whose cells run in ranks that are forked for them."""

    @abstractmethod
    def measure(self, rounds: Rounds) -> None:
        """What each rank of a cell does, on a process group that is there already."""

    def drive(self, cell: Cell, lab: Lab | None, rows: RowFile, progress: Progress) -> None:
        """Fork the ranks of the cell, and have each of them measure."""
        rank = partial(self._live, cell, rows, progress)
        fork_ranks(lab, rank, ranks_per_host=cell.ranks_per_host, timeout=cell.seconds * PATIENCE + GRACE)

    def _live(self, cell: Cell, rows: RowFile, progress: Progress) -> None:
        """The life of a rank."""
        # Remarks of peers about the machine would run through the line of the progress.
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        dist.init_process_group("gloo", timeout=WIRE_TIMEOUT)
        rounds = Rounds(cell, rows, progress=progress, meter=lambda: read_counters(interface).sent)
        self.measure(rounds)
        dist.destroy_process_group()
