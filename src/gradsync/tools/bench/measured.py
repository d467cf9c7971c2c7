"""Scenarios measured in the benchmark's own ranks: the usual kind."""

import logging
import os
import warnings
from abc import abstractmethod
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from gradsync.tools.bench.device import DEVICES
from gradsync.tools.bench.measure import Progress, Rounds
from gradsync.tools.bench.ranks import CellRanks
from gradsync.tools.bench.record import Cell, RowFile
from gradsync.tools.bench.scenario import Scenario
from gradsync.tools.lab import read_counters

__all__ = ["MeasuredScenario"]

WIRE_TIMEOUT = timedelta(seconds=120)


class MeasuredScenario(Scenario):
    """One whose cells run in ranks that are forked for them."""

    @abstractmethod
    def measure(self, rounds: Rounds) -> None:
        """What each rank of a cell does, on a process group that is there already."""

    def drive(self, cell: Cell, ranks: CellRanks, rows: RowFile, progress: Progress) -> None:
        """Fork the ranks of the cell, and have each of them measure."""
        rank = partial(self._live, cell, rows, progress)
        times, more = DEVICES[cell.device].patience
        ranks.fork(cell, rank, timeout=cell.seconds * times + more)

    def _live(self, cell: Cell, rows: RowFile, progress: Progress) -> None:
        """The life of a rank."""
        # Remarks of peers about the machine would run through the line of the progress.
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        device = DEVICES[cell.device]()
        facts = device.open()
        dist.init_process_group(device.backend, timeout=WIRE_TIMEOUT)
        rounds = Rounds(cell, rows, progress=progress, meter=lambda: read_counters(interface).sent, device=device)
        for name, value in facts.items():
            rounds.fact(name, value)
        self.measure(rounds)
        dist.destroy_process_group()
