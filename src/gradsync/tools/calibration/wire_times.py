"""Inside every rank: collectives of several sizes, timed one by one after a pause, as the slowest rank saw them."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from gradsync.communicator import (
    Communicator,
    Handle,
    HierarchicalCommunicator,
    PeerExchangeCommunicator,
    SharedMemoryCommunicator,
    scattering_over,
)
from gradsync.core.reduction.codings import Blocks, Coding, Rounded, Signs
from gradsync.core.reduction.quantize import exchange
from gradsync.observe.plan.calibration import Reading
from gradsync.observe.plan.network import Operation, ReductionCost, Transport, Way

__all__ = ["CODINGS", "PAUSE", "SIZES", "coding_costs", "way_of", "wire_readings"]

KIB, MIB = 1024, 1024 * 1024
SIZES = (4 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
REPEATS, WARM_UP = 8, 1
# In which what a shaped link saves up is full again.
PAUSE = 0.04
CODED_BYTES = 512 * KIB
CODINGS: dict[str, Coding] = {
    "bf16": Rounded(torch.bfloat16),
    "fp16": Rounded(torch.float16),
    "int8": Blocks(8, 256),
    "int4": Blocks(4, 256),
    "sign": Signs(256),
}


def way_of(communicator: Communicator) -> Way:
    """How a communicator of ours moves bytes."""
    ways: dict[type, Way] = {
        PeerExchangeCommunicator: "exchange",
        SharedMemoryCommunicator: "shared",
        HierarchicalCommunicator: "hierarchical",
    }
    return ways.get(type(communicator), "ring")


def wire_readings(
    communicator: Communicator, device: torch.device, sizes: Sequence[int] = SIZES, *, pause: float = PAUSE
) -> list[Reading]:
    """Time all-reduces, and their two halves as the engine would start them. Collective."""
    scattering = scattering_over(communicator, device)
    ranks = communicator.world_size
    readings = []
    for size in sizes:
        numel = max(size // 4 // ranks, 1) * ranks
        whole = communicator.allocate(numel, torch.float32, device)[:numel].zero_()
        share = torch.zeros(numel // ranks, device=device)
        starts: list[tuple[Operation, Communicator, Callable[[], Handle]]] = [
            ("all_reduce", communicator, lambda whole=whole: communicator.all_reduce(whole)),  # type: ignore[misc]
            (
                "all_gather",
                communicator,
                lambda whole=whole, share=share: communicator.all_gather(whole, share),  # type: ignore[misc]
            ),
            (
                "reduce_scatter",
                scattering,
                lambda whole=whole, share=share: scattering.reduce_scatter(share, whole),  # type: ignore[misc]
            ),
        ]
        for operation, wire, start in starts:
            seconds = _usual(communicator, lambda start=start: start().wait(), pause)  # type: ignore[misc]
            readings.append(
                Reading(operation=operation, way=way_of(wire), nbytes=numel * 4, seconds=seconds, ranks=ranks)
            )
    return readings


def coding_costs(
    communicator: Communicator, device: torch.device, wire: Transport, pause: float = PAUSE
) -> list[ReductionCost]:
    """The time left of an exchange of coded gradients when the time of its bytes is subtracted. Collective."""
    costs = []
    numel = CODED_BYTES // 4
    values = torch.zeros(numel, device=device).normal_(std=1e-3, generator=torch.Generator().manual_seed(0))
    for name, coding in CODINGS.items():
        starting: list[float] = []

        def run(coding: Coding = coding, starting: list[float] = starting) -> None:
            began = time.perf_counter()
            handle = exchange(coding, values.clone(), communicator)
            starting.append(time.perf_counter() - began)
            handle.wait()

        whole = _usual(communicator, run, pause)
        share = coding.nbytes(numel) / CODED_BYTES
        moved = [wire.cost(operation, CODED_BYTES * share) for operation in ("all_to_all", "all_gather")]
        burst = wire.topology.between.burst
        bytes_seconds = max(0.0, sum(each.nbytes for each in moved) - burst) / moved[0].bandwidth
        encode = statistics.median(starting)
        decode = max(0.0, whole - encode - bytes_seconds - sum(each.latency for each in moved))
        costs.append(
            ReductionCost(
                name=name,
                share=share,
                operations=("all_to_all", "all_gather"),
                encode=encode / CODED_BYTES,
                decode=decode / CODED_BYTES,
            )
        )
    return costs


def _usual(communicator: Communicator, run: Callable[[], object], pause: float) -> float:
    """Of a few tries, each as long as it was on the slowest rank."""
    seconds = []
    for number in range(WARM_UP + REPEATS):
        time.sleep(pause)
        # Whoever comes early would count waiting for the others.
        _meet(communicator)
        began = time.perf_counter()
        run()
        taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        communicator.all_reduce(taken, "max").wait()
        if number >= WARM_UP:
            seconds.append(float(taken))
    # Whatever else the machine does only adds to it.
    return statistics.quantiles(seconds, n=4)[0]


def _meet(communicator: Communicator) -> None:
    communicator.all_reduce(torch.zeros(1)).wait()
