"""Gives a model its recorder: the user's own, or the default one that every model has; and measures the rank's clock.

``GRADSYNC_RECORD`` is a folder to write to, or ``off``; without it the last steps of models on the CPU are kept in
memory.

The offset of a rank's clock from rank 0's is measured by sending the time back and forth. If both directions take
equally long, rank 0 read its clock in the middle of the round trip; if not, it read it at some point of the round trip.
So half of the shortest round trip bounds the error. Ranks of one machine share a clock: only one rank per machine is
measured. Clocks drift: later the offset is compared with the ends of collectives, which all ranks see at nearly the
same time (:mod:`gradsync.observe.explain.merging`).
"""

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.core.engine.observer import Observer, Observers
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.observe.recording.files import Clock
from gradsync.observe.recording.recorder import Recorder

__all__ = [
    *("VARIABLE", "align_clocks", "attach_recorder", "choose_recorder", "clock_identity", "described"),
    *("measure_offset", "recorder_in"),
]

LOGGER = logging.getLogger("gradsync")
VARIABLE = "GRADSYNC_RECORD"
OFF = "off"
# Round trips to a machine. Where there are many machines, fewer each.
ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 30, 5, 600


def recorder_in(observer: Observer | None) -> Recorder | None:
    """The user's own recorder, alone or among several observers."""
    if isinstance(observer, Recorder):
        return observer
    among: Iterable[Observer] = observer.members if isinstance(observer, Observers) else ()
    return next((found for each in among if (found := recorder_in(each)) is not None), None)


def choose_recorder(observer: Observer | None, device: torch.device) -> Recorder | None:
    """The recorder of a model that ``observer`` watches.

    On an accelerator marks are events, which have a cost there: a model is recorded only on request.
    """
    own = recorder_in(observer)
    if own is not None:
        return own
    setting = os.environ.get(VARIABLE, "")
    if setting == OFF or (not setting and device.type != "cpu"):
        return None
    return Recorder(setting or None)


def described(recorder: Recorder | None) -> list[tuple[str, str]]:
    """What ranks must have in common to record: those that write measure their clocks, and that takes all of them."""
    return [("recording", "to no folder" if recorder is None or recorder.folder is None else "to a folder")]


def attach_recorder(
    recorder: Recorder | None, synchronizer: Synchronizer, name: str, communicator: Communicator, *, meets: bool
) -> None:
    """Attach the recorder to its model. Collective where it writes to a folder, if ranks may meet."""
    if recorder is None:
        return
    clock = align_clocks(communicator) if meets and recorder.folder is not None else Clock()
    try:
        recorder.attach(synchronizer, name, clock)
    except Exception:
        LOGGER.exception("the recorder cannot be attached to the model, and records nothing")


def clock_identity() -> str:
    """Processes with the same identity share one clock: it counts from the start of the machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # A container may have been given a clock of its own.
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        # Not Linux: nothing is known, and every process is measured.
        return f"unknown {time.time_ns()}"


def align_clocks(communicator: Communicator) -> Clock:
    """Measure this rank's clock against rank 0's. Collective."""
    if communicator.world_size == 1:
        return Clock(error=0.0)
    identities = gather_bytes(communicator, clock_identity().encode())
    machines = list(dict.fromkeys(identities))
    rounds = max(LEAST_ROUNDS, min(ROUNDS, MOST_ROUNDS // len(machines)))
    mine = Clock(error=0.0)
    for machine in machines[1:]:
        # All take part in the rounds of every machine: on most transports only that lets two ranks communicate.
        measured = measure_offset(communicator, identities.index(machine), rounds)
        if measured is not None:
            mine = measured
        clocks = torch.tensor([mine.offset, mine.error or 0.0], dtype=torch.float64, device=communicator.device)
        communicator.broadcast(clocks, identities.index(machine)).wait()
        if identities[communicator.rank] == machine:
            offset, error = clocks.tolist()
            mine = Clock(offset=offset, error=error)
    return mine


def measure_offset(communicator: Communicator, peer: int, rounds: int = ROUNDS) -> Clock | None:
    """The offset of rank ``peer``'s clock from rank 0's; None on all other ranks. Collective."""
    best: Clock | None = None
    message = torch.zeros(1, dtype=torch.float64, device=communicator.device)
    for _ in range(rounds):
        sent = time.perf_counter()
        communicator.broadcast(message, peer).wait()
        # On a GPU that waits for the message.
        message.item()
        if communicator.rank == 0:
            message.fill_(time.perf_counter())
        communicator.broadcast(message, 0).wait()
        there = message.item()
        received = time.perf_counter()
        error = (received - sent) / 2
        if best is None or best.error is None or error < best.error:
            best = Clock(offset=there - (sent + received) / 2, error=error)
    return best if communicator.rank == peer else None
