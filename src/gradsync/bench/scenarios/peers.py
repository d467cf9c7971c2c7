"""Every wrapper people use today, at several links: its time, what it exposes, its bytes and its memory.

Between hosts the computation is emulated, so that ranks do not fight over this machine's cores; on one host two real
transformers are trained as well, one that mostly communicates and one that mostly computes.

Memory is measured in cells of its own, one a peer: in ranks that have nothing else. Each first wraps and steps a tiny
model, so that imports and first uses are not counted, then watches its proportional set size while it wraps and steps
the real one (see :mod:`gradsync.bench.memory`).
"""

import gc
from dataclasses import replace

import torch
import torch.distributed as dist

from gradsync.bench.measure import Parts, Rounds, Step
from gradsync.bench.memory import PeakMemory, memory_unreadable
from gradsync.bench.peers import DDP, PEERS, Peer
from gradsync.bench.real_workload import RealWorkload
from gradsync.bench.record import EVERY, Cell
from gradsync.bench.scenario import ALONE, OURS, TUNED
from gradsync.bench.scenarios.peers_shown import MEMORY, PEAK, read, show_pictures, show_tables
from gradsync.bench.statistics import wire_seconds
from gradsync.bench.tuning import best_bucket_mb
from gradsync.bench.windows import plain_step, settle
from gradsync.bench.workload import Workload
from gradsync.lab.profile import transformer
from gradsync.lab.rate import Rate

__all__ = ["Peers"]

# Rounds of a cell whose times spread, against those of the others.
MORE = 1.5
# Model and computation of the emulated cells; what is sent takes about as long as what is computed.
SMALL = {"layers": 2, "seconds": 0.02}
SLOW_PARAMETERS, FAST_PARAMETERS = 300_000, 750_000
WHOLE = {"layers": 8, "width": 512, "batch": 1, "length": 8}
TINY = RealWorkload(layers=1, width=16, batch=1, length=4)
# Wrappers make their buckets anew in the first steps.
MEMORY_STEPS = 7
# Allocators keep more or less of what is freed, so one run says little about a few percent.
MEMORY_RUNS = 5


class Peers:
    """gradsync beside naive averaging, torch's DDP, Accelerate, Lightning Fabric and FSDP2's replicate."""

    name = "peers"
    title = "Peers: the same model under every wrapper"
    source = "The wrappers of torch 2.13, Accelerate and Lightning Fabric, as their documentation uses them."
    question = "Which wrapper costs least: time, bytes on the wire, memory?"

    def cells(self, *, quick: bool) -> list[Cell]:
        cells = _emulated(quick=quick) + _real(quick=quick)
        memory = [_memory_cell(name, repeat) for repeat in range(1 if quick else MEMORY_RUNS) for name in PEERS]
        return cells + memory

    def measure(self, rounds: Rounds) -> None:
        options = dict(rounds.cell.options)
        if MEMORY in options:
            _measure_memory(rounds, PEERS[options.pop(MEMORY)], RealWorkload(**options))
        elif rounds.cell.emulated:
            _measure_time(rounds, Workload(profile=transformer(**options)))
        else:
            _measure_time(rounds, RealWorkload(**options))

    tables = staticmethod(show_tables)
    pictures = staticmethod(show_pictures)
    reading = staticmethod(read)


def _memory_cell(name: str, repeat: int) -> Cell:
    return Cell(
        name=f"memory, {name}" + (f", run {repeat + 1}" if repeat else ""),
        warmup=0,
        rounds=MEMORY_STEPS,
        seconds=3.0,
        emulated=False,
        options={MEMORY: name, **WHOLE},
    )


def _emulated(*, quick: bool) -> list[Cell]:
    rounds, larger = (30, 1) if quick else (100, 4)
    slow = {**SMALL, "parameters": SLOW_PARAMETERS * larger, "seconds": SMALL["seconds"] * larger}
    fast = {**slow, "parameters": FAST_PARAMETERS * larger}
    one = Cell(name="1 host, 2 ranks", rounds=rounds, seconds=(rounds + 15) * 0.4 * larger, options=fast)
    two = replace(one, name="2 hosts, 400 Mbit/s", hosts=2, rate="400mbit", options=slow)
    faster = replace(two, name="2 hosts, 1 Gbit/s", rate="1gbit", options=fast)
    # Four ranks on a machine with fewer cores are less regular.
    rounds = round(rounds * MORE)
    crowded = replace(two, name="2×2 ranks, 400 Mbit/s", ranks=4, rounds=rounds, seconds=two.seconds * 1.5 * MORE)
    # Two real cells stand for one host in a quick run.
    return [two, crowded] if quick else [one, two, faster, crowded]


def _real(*, quick: bool) -> list[Cell]:
    rounds = 30 if quick else 100
    heavy = {**WHOLE, "layers": 6, "width": 256} if quick else WHOLE
    light = {"layers": 4, "width": 128, "batch": 1, "length": 64}
    return [
        Cell(
            name=f"1 host, {RealWorkload(**options).parameters / 1e6:.1f}M parameters",
            rounds=count,
            seconds=(count + 15) * seconds,
            emulated=False,
            options=options,
        )
        # Short steps are less regular.
        for options, count, seconds in ((heavy, rounds, 0.6 if quick else 2.0), (light, round(rounds * MORE), 0.35))
    ]


def _measure_time(rounds: Rounds, workload: Workload | RealWorkload) -> None:
    rounds.fact("gradient bytes", workload.nbytes)
    rounds.limits(compute=ALONE, wire={EVERY: _least_wire(rounds.cell, workload.nbytes)})
    peers = {**PEERS, TUNED: DDP(name=TUNED, tuned=True, bucket_mb=best_bucket_mb(rounds, workload))}
    variants: dict[str, Step] = {}
    for name, peer in peers.items():
        reason = peer.absent()
        if reason is not None:
            rounds.absent(name, reason)
            continue
        variants[name] = plain_step(workload, peer)
    # DDP tuned had its trials; this is where gradsync makes its own choice of buckets.
    settle(variants[OURS])
    rounds.run(variants)


def _least_wire(cell: Cell, nbytes: int) -> float:
    """What must cross the link of a host, at least: its ranks can add up among themselves first."""
    rate = None if cell.rate is None else Rate.parse(cell.rate).bytes_per_second
    return wire_seconds(nbytes, cell.hosts or 1, rate)


def _measure_memory(rounds: Rounds, peer: Peer, workload: RealWorkload) -> None:
    reason = peer.absent() or memory_unreadable()
    if reason is not None:
        rounds.absent(peer.name, reason)
        return
    rounds.fact("gradient bytes", workload.nbytes)
    plain_step(TINY, peer)()
    gc.collect()
    dist.barrier()
    with PeakMemory() as memory:
        train = plain_step(workload, peer)

        def step() -> Parts:
            train()
            total = torch.tensor(float(memory.take()), dtype=torch.float64)
            dist.all_reduce(total)
            return {PEAK: float(total) / rounds.world_size}

        rounds.run({peer.name: step})
