"""The offset of a rank's clock from rank 0's, measured by sending the time back and forth.

A rank sends a message to rank 0 and receives the time there. If both directions take equally long, rank 0 read its
clock in the middle of the round trip; if not, it read it at some point of the round trip. So half of the shortest round
trip bounds the error. Ranks of one machine share a clock: only one rank per machine is measured.

Clocks drift. Across machines the offset measured at the beginning is later compared with the ends of collectives, which
all ranks see at nearly the same time: see :mod:`gradsync.observe.explain.merging`.
"""

import time
from pathlib import Path

import torch

from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.observe.recording.steps import Clock

__all__ = ["align_clocks", "clock_identity", "measure_offset"]

ROUNDS = 30
# Where there are many machines, fewer rounds each.
MOST_ROUNDS = 600
LEAST_ROUNDS = 5


def clock_identity() -> str:
    """Processes with the same identity share one clock: it counts from the start of the machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # A container may have been given a clock of its own.
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        # Not Linux: nothing is known, and everybody is measured.
        return f"unknown {time.time_ns()}"


def align_clocks(communicator: Communicator) -> Clock:
    """This rank's clock against rank 0's. Collective."""
    if communicator.world_size == 1:
        return Clock(error=0.0)
    told = gather_bytes(communicator, clock_identity().encode())
    machines = list(dict.fromkeys(told))
    rounds = max(LEAST_ROUNDS, min(ROUNDS, MOST_ROUNDS // len(machines)))
    mine = Clock(error=0.0)
    for machine in machines[1:]:
        # All take part in the rounds of every machine: on most wires that is how two ranks can talk.
        measured = measure_offset(communicator, told.index(machine), rounds)
        if measured is not None:
            mine = measured
        clocks = torch.tensor([mine.offset, mine.error or 0.0], dtype=torch.float64, device=communicator.device)
        communicator.broadcast(clocks, told.index(machine)).wait()
        if told[communicator.rank] == machine:
            offset, error = clocks.tolist()
            mine = Clock(offset=offset, error=error)
    return mine


def measure_offset(communicator: Communicator, peer: int, rounds: int = ROUNDS) -> Clock | None:
    """The offset of rank ``peer``'s clock from rank 0's; None on all other ranks. Collective."""
    best: Clock | None = None
    word = torch.zeros(1, dtype=torch.float64, device=communicator.device)
    for _ in range(rounds):
        sent = time.perf_counter()
        communicator.broadcast(word, peer).wait()
        # On a GPU that waits for the word.
        word.item()
        if communicator.rank == 0:
            word.fill_(time.perf_counter())
        communicator.broadcast(word, 0).wait()
        there = word.item()
        received = time.perf_counter()
        error = (received - sent) / 2
        if best is None or best.error is None or error < best.error:
            best = Clock(offset=there - (sent + received) / 2, error=error)
    return best if communicator.rank == peer else None
