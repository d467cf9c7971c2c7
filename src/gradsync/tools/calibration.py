"""Runs the calibration of a plan: two ranks on this machine, or on hosts of a lab, take the measurements.

Each rank times a model without a wrapper, and all of them time collectives of several sizes, one by one after a pause,
as the slowest rank saw them. Ranks are forked, and rank 0 leaves the measurements in a file: a rank that fails leaves
none, and prints its traceback.
"""

import importlib
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradsync.communicator import (
    Communicator,
    Handle,
    HierarchicalCommunicator,
    PeerExchangeCommunicator,
    SharedMemoryCommunicator,
    choose_communicator,
    fit_communicator,
    scattering_over,
)
from gradsync.communicator.choose import Choice
from gradsync.core.reduction.codings import Blocks, Coding, Rounded, Signs
from gradsync.core.reduction.measurement import measure_link
from gradsync.core.reduction.quantize import sum_coded
from gradsync.observe.plan.calibration import Calibration, Reading, fit_transport, no_link, slow_for_good
from gradsync.observe.plan.network import REDUCTIONS, Operation, ReductionCost, Transport, Way
from gradsync.observe.plan.profile import BucketProfile, Jitter, StepProfile, steady_straggler
from gradsync.tools.bench.peers import NoWrapper, WrappedModel
from gradsync.tools.bench.workload import Workload
from gradsync.tools.lab.lab import Lab, LabPlan, Rate, fork_ranks

__all__ = ["CalibrationPlan", "run_calibration"]

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=120)
LAB_NAME = "plan"
# Of Gloo, which has two threads for its collectives; all other transports have one.
GROUP_IN_FLIGHT = 2
KIB, MIB = 1024, 1024 * 1024
SIZES = (4 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
STEPS_WARM_UP = 3
REPEATS, WARM_UP = 8, 1
# In which what a shaped link saves up is full again.
PAUSE = 0.04
CODED_BYTES = 512 * KIB
CODED_OPERATIONS: tuple[Operation, ...] = ("all_to_all", "all_gather")
CODINGS: dict[str, Coding] = {
    "bf16": Rounded(torch.bfloat16),
    "fp16": Rounded(torch.float16),
    "int8": Blocks(8, 256),
    "int4": Blocks(4, 256),
    "sign": Signs(256),
}
WAYS: dict[type, Way] = {
    PeerExchangeCommunicator: "exchange",
    SharedMemoryCommunicator: "shared",
    HierarchicalCommunicator: "hierarchical",
}


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """What is measured: a ``workload`` on two ranks; with a ``rate`` on two hosts of a lab with such links between,
    else on this machine. Collectives of ``sizes`` in bytes come after a ``pause``, in which a link that saves bytes up
    has done so."""

    workload: Workload
    rate: Rate | None = None
    steps: int = 10
    sizes: Sequence[int] = SIZES
    pause: float = PAUSE
    timeout: float = 300.0


def run_calibration(plan: CalibrationPlan) -> Calibration:
    """Measure, and fit."""
    # The first optimizer of a process imports it, which takes seconds: once here, and not once per rank.
    importlib.import_module("torch._dynamo")
    hosts = None if plan.rate is None else LabPlan(name=LAB_NAME, hosts=2, rate=plan.rate)
    with (
        tempfile.TemporaryDirectory(prefix="gradsync-plan-") as folder,
        nullcontext() if hosts is None else Lab(hosts) as lab,
    ):
        path = Path(folder) / "calibration.json"
        ranks_per_host = 2 if lab is None else 1
        fork_ranks(lab, partial(_be_rank, plan, path), ranks_per_host=ranks_per_host, timeout=plan.timeout)
        return Calibration.load(path)


def _be_rank(plan: CalibrationPlan, path: Path) -> None:
    """Measure in a rank; rank 0 writes the calibration to ``path``."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    calibration = _measure(plan)
    if dist.get_rank() == 0:
        calibration.save(path)
    dist.barrier()
    dist.destroy_process_group()


def _measure(plan: CalibrationPlan) -> Calibration:
    """Measure on the ranks of the default group. Collective."""
    group = choose_communicator()
    # Ranks of one machine would share memory, which says nothing of a link.
    chosen = Choice(communicator=group, reason="its sockets") if plan.rate is None else fit_communicator(group, CPU)
    communicator = chosen.communicator
    scattering = scattering_over(communicator, CPU)
    transport = fit_transport(
        [each for size in plan.sizes for each in _time_collectives(communicator, scattering, size, plan.pause)],
        in_flight=GROUP_IN_FLIGHT if _way_of(communicator) == "ring" else 1,
        hidden=measure_link(communicator, CPU).hidden,
    )
    workload = plan.workload
    alone = workload.wrap(NoWrapper())
    profile, own = _time_model(alone, workload, plan.steps)
    codings = {name: _coding_cost(communicator, transport, name, plan.pause) for name in CODINGS}
    rate = plan.rate
    mine = torch.tensor(own, dtype=torch.float64)
    everybody = mine.new_empty(communicator.world_size * len(own))
    communicator.all_gather(everybody, mine).wait()
    seconds: list[list[float]] = everybody.view(communicator.world_size, -1).tolist()
    slow = steady_straggler(seconds)
    warnings = [] if slow is None else [slow_for_good(slow[0], f"it takes {slow[1]:.2g} times as long as the others")]
    if rate is None:
        warnings.append(no_link(transport.way, communicator.world_size))
    return Calibration(
        profile=profile,
        transport=transport,
        jitter=Jitter.between(seconds),
        reductions={**REDUCTIONS, **codings},
        link=None if rate is None else rate.bytes_per_second,
        facts={
            "ranks": str(communicator.world_size),
            "transport": str(chosen),
            "link": "inside this machine" if rate is None else str(rate),
            "cores": str(len(os.sched_getaffinity(0))),
        },
        warnings=tuple(warnings),
    )


# -- collectives -------------------------------------------------------------------------------------------------------


def _way_of(communicator: Communicator) -> Way:
    return WAYS.get(type(communicator), "ring")


def _time_collectives(
    communicator: Communicator, scattering: Communicator, size: int, pause: float
) -> Iterator[Reading]:
    """Time an all-reduce of ``size`` bytes, and its two halves as the engine would start them. Collective."""
    ranks = communicator.world_size
    numel = max(size // 4 // ranks, 1) * ranks
    whole = communicator.allocate(numel, torch.float32, CPU)[:numel].zero_()
    share = torch.zeros(numel // ranks)
    starts: list[tuple[Operation, Communicator, Callable[[], Handle]]] = [
        ("all_reduce", communicator, lambda: communicator.all_reduce(whole)),
        ("all_gather", communicator, lambda: communicator.all_gather(whole, share)),
        ("reduce_scatter", scattering, lambda: scattering.reduce_scatter(share, whole)),
    ]
    for operation, mover, start in starts:
        seconds = _usual(communicator, lambda start=start: start().wait(), pause)  # type: ignore[misc]
        yield Reading(operation=operation, way=_way_of(mover), nbytes=numel * 4, seconds=seconds, ranks=ranks)


def _coding_cost(communicator: Communicator, transport: Transport, name: str, pause: float) -> ReductionCost:
    """The time left of an exchange of coded gradients when the time of its bytes is subtracted. Collective."""
    coding, numel = CODINGS[name], CODED_BYTES // 4
    values = torch.zeros(numel).normal_(std=1e-3, generator=torch.Generator().manual_seed(0))
    starting: list[float] = []

    def run() -> None:
        began = time.perf_counter()
        handle = sum_coded(coding, values.clone(), communicator)
        starting.append(time.perf_counter() - began)
        handle.wait()

    whole = _usual(communicator, run, pause)
    share = coding.nbytes(numel) / CODED_BYTES
    moved = [transport.cost(operation, CODED_BYTES * share) for operation in CODED_OPERATIONS]
    burst = transport.topology.between.burst
    bytes_seconds = max(0.0, sum(each.nbytes for each in moved) - burst) / moved[0].bandwidth
    encode = statistics.median(starting)
    decode = max(0.0, whole - encode - bytes_seconds - sum(each.latency for each in moved))
    costs = {"encode": encode / CODED_BYTES, "decode": decode / CODED_BYTES}
    return ReductionCost(name=name, share=share, operations=CODED_OPERATIONS, **costs)


def _usual(communicator: Communicator, run: Callable[[], object], pause: float) -> float:
    """The usual seconds of a few tries, each as long as it was on the slowest rank."""
    seconds = []
    for number in range(WARM_UP + REPEATS):
        time.sleep(pause)
        # Ranks start together: one that came early would include waiting for the others.
        communicator.all_reduce(torch.zeros(1)).wait()
        began = time.perf_counter()
        run()
        taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        communicator.all_reduce(taken, "max").wait()
        if number >= WARM_UP:
            seconds.append(float(taken))
    # Whatever else the machine does only adds to it.
    return statistics.quantiles(seconds, n=4)[0]


# -- the model ---------------------------------------------------------------------------------------------------------


class _Marks:
    """Moments of a step, by what happened."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def begin(self) -> None:
        self.steps.append({})
        self.mark("begin")

    def mark(self, name: str) -> None:
        # Of what happens several times, in a forward that uses a layer twice: the first time it is needed.
        if not name.startswith("need ") or name not in self.steps[-1]:
            self.steps[-1][name] = time.perf_counter()

    def between(self, first: str, second: str) -> float:
        """The median seconds from the one moment to the other, over the steps that count."""
        return statistics.median(self.all_between(first, second))

    def all_between(self, first: str, second: str) -> list[float]:
        measured = self.steps[STEPS_WARM_UP:]
        return [step[second] - step[first] for step in measured if first in step and second in step]


def _time_model(wrapped: WrappedModel, workload: Workload, steps: int) -> tuple[StepProfile, list[float]]:
    """Run a few steps of the workload.

    Returns a step whose buckets are single parameters, in the order in which they become ready; and how long forward
    and backward took together in each of the steps.
    """
    model, optimizer, marks = wrapped.model, wrapped.optimizer, _Marks()
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    handles: list[torch.utils.hooks.RemovableHandle] = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: marks.mark(f"ready {name}"))
        for name, parameter in parameters.items()
    ]
    handles += _on_need(marks, model, parameters)
    try:
        for _ in range(STEPS_WARM_UP + steps):
            marks.begin()
            loss = workload.forward(model)
            marks.mark("forward")
            loss.backward()
            marks.mark("backward")
            optimizer.step()
            optimizer.zero_grad()
            marks.mark("end")
    finally:
        for handle in handles:
            handle.remove()
    return _read(marks, parameters)


def _on_need(
    marks: _Marks, model: nn.Module, parameters: dict[str, nn.Parameter]
) -> list[torch.utils.hooks.RemovableHandle]:
    names = defaultdict(list)
    for name, parameter in parameters.items():
        names[id(parameter)].append(name)
    handles = []
    for module in model.modules():
        own = [name for each in module._parameters.values() if each is not None for name in names.get(id(each), [])]
        if own:

            def note(_module: nn.Module, _args: object, own: list[str] = own) -> None:
                for name in own:
                    marks.mark(f"need {name}")

            handles.append(module.register_forward_pre_hook(note))
    return handles


def _read(marks: _Marks, parameters: dict[str, nn.Parameter]) -> tuple[StepProfile, list[float]]:
    pieces = []
    for name, parameter in parameters.items():
        ready = marks.all_between("forward", f"ready {name}")
        if ready:
            need = marks.all_between("begin", f"need {name}")
            pieces.append((statistics.median(ready), statistics.median(need) if need else 0.0, parameter))
    pieces.sort(key=lambda piece: piece[0])
    forward, backward = marks.between("begin", "forward"), marks.between("forward", "backward")
    buckets = tuple(
        BucketProfile(index=index, nbytes=each.nbytes, ready=min(ready, backward), need=min(need, forward))
        for index, (ready, need, each) in enumerate(pieces)
    )
    optimizer = marks.between("backward", "end")
    profile = StepProfile(forward=forward, backward=backward, optimizer=optimizer, buckets=buckets)
    return profile, marks.all_between("begin", "backward")
