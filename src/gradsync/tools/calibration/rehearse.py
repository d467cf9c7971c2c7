"""Runs the calibration of a plan: two ranks on this machine, or on hosts of a lab, take the measurements.

Ranks are forked, and rank 0 leaves the measurements in a file: a rank that fails leaves none, and prints its traceback.
"""

import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from gradsync.communicator import Communicator, choose_communicator, fit_communicator
from gradsync.communicator.choose import Choice
from gradsync.core.reduction.measurement import measure_link
from gradsync.observe.plan.calibration import Calibration, fit_wire, no_link, slow_for_good
from gradsync.observe.plan.network import REDUCTIONS
from gradsync.observe.plan.profile import Jitter, steady_straggler
from gradsync.tools.bench.peers import NoWrapper
from gradsync.tools.bench.workload import Workload
from gradsync.tools.calibration.model_times import time_model
from gradsync.tools.calibration.wire_times import PAUSE, SIZES, coding_costs, way_of, wire_readings
from gradsync.tools.lab import Lab, LabPlan, Rate
from gradsync.tools.lab.lab import fork_ranks

__all__ = ["Rehearsal", "rehearse"]

WIRE_TIMEOUT = timedelta(seconds=120)
LAB_NAME = "plan"
# Of Gloo, which has two threads for its collectives; all other wires have one.
GROUP_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What is tried: a ``workload`` on two ranks; with a ``rate`` on two hosts of a lab that are joined by such links,
    else on this machine. Collectives of ``sizes`` in bytes come after a ``pause``, in which a link that saves bytes up
    has done so."""

    workload: Workload
    rate: Rate | None = None
    steps: int = 10
    sizes: Sequence[int] = SIZES
    pause: float = PAUSE
    timeout: float = 300.0


def rehearse(rehearsal: Rehearsal) -> Calibration:
    """Measure, and fit."""
    # The first optimizer of a process imports it, which takes seconds: once here, and not once a rank.
    importlib.import_module("torch._dynamo")
    plan = None if rehearsal.rate is None else LabPlan(name=LAB_NAME, hosts=2, rate=rehearsal.rate)
    with (
        tempfile.TemporaryDirectory(prefix="gradsync-plan-") as folder,
        nullcontext() if plan is None else Lab(plan) as lab,
    ):
        path = Path(folder) / "calibration.json"
        fork_ranks(
            lab,
            partial(_be_rank, rehearsal, path),
            ranks_per_host=2 if lab is None else 1,
            timeout=rehearsal.timeout,
        )
        return Calibration.load(path)


def _be_rank(rehearsal: Rehearsal, path: Path) -> None:
    """The life of a rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", timeout=WIRE_TIMEOUT)
    calibration = measure(rehearsal)
    if dist.get_rank() == 0:
        calibration.save(path)
    dist.barrier()
    dist.destroy_process_group()


def measure(rehearsal: Rehearsal) -> Calibration:
    """On the ranks of the default group. Collective."""
    device = torch.device("cpu")
    group = choose_communicator()
    # Ranks of one machine would share memory, which says nothing of a link.
    chosen = (
        Choice(communicator=group, reason="its sockets") if rehearsal.rate is None else fit_communicator(group, device)
    )
    communicator = chosen.communicator
    readings = wire_readings(communicator, device, rehearsal.sizes, pause=rehearsal.pause)
    is_group = way_of(communicator) == "ring"
    hidden = measure_link(communicator, device).hidden
    wire = fit_wire(readings, in_flight=GROUP_IN_FLIGHT if is_group else 1, hidden=hidden)
    workload = rehearsal.workload
    alone = workload.wrap(NoWrapper())
    times = time_model(alone.model, workload.forward, alone.optimizer, steps=rehearsal.steps)
    codings = {each.name: each for each in coding_costs(communicator, device, wire, pause=rehearsal.pause)}
    rate = rehearsal.rate
    seconds = _on_all_ranks(communicator, times.seconds)
    slow = steady_straggler(seconds)
    warnings = [] if slow is None else [slow_for_good(slow[0], f"it takes {slow[1]:.2g} times as long as the others")]
    if rate is None:
        warnings.append(no_link(wire.way, communicator.world_size))
    return Calibration(
        profile=times.profile,
        wire=wire,
        jitter=Jitter.between(seconds),
        reductions={**REDUCTIONS, **codings},
        link=None if rate is None else rate.bytes_per_second,
        facts={
            "ranks": str(communicator.world_size),
            "wire": str(chosen),
            "link": "inside this machine" if rate is None else str(rate),
            "cores": str(len(os.sched_getaffinity(0))),
        },
        warnings=tuple(warnings),
    )


def _on_all_ranks(communicator: Communicator, seconds: Sequence[float]) -> list[list[float]]:
    own = torch.tensor(seconds, dtype=torch.float64)
    everybody = own.new_empty(communicator.world_size * len(own))
    communicator.all_gather(everybody, own).wait()
    rows: list[list[float]] = everybody.view(communicator.world_size, -1).tolist()
    return rows
