"""How much memory a rank needs under each wrapper: part of the scenario ``peers``.

On the CPU every peer has its own cell, with ranks that hold nothing else: their use is the process's proportional set
size. On a GPU torch's allocator counts, starting from what is allocated before the peer wraps its model, so the peers
follow one another in the ranks of one cell. Each first wraps and steps a tiny model, so that imports and first uses are
not counted.
"""

import gc
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradsync.observe.charts.numbers import count
from gradsync.tools.bench.measure import Parts, Rounds
from gradsync.tools.bench.peers import ALONE, OURS, PEERS, TUNED, Peer
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.scenario import MISSING, Table, gpu_cell
from gradsync.tools.bench.windows import plain_step
from gradsync.tools.bench.workload import RealWorkload

__all__ = [
    "MEMORY",
    "SAME",
    "SHOWN",
    "STOCK",
    "WHOLE",
    "Memory",
    "gpu_memory_cell",
    "heavier",
    "measure_memory",
    "memory_cell",
    "memory_table",
]

STOCK = "DDP stock"
# From the top down.
SHOWN = (OURS, TUNED, STOCK, "Accelerate", "Lightning Fabric", "FSDP2 replicate", "naive")
# A cell with this option measures memory, of the peer it names or of all; its samples have this part.
MEMORY, PEAK, ALL = "memory", "peak bytes", "all peers"
# Of those that measure memory.
LAST_STEPS = 3
# Bytes and memory within this share of each other are the same.
SAME = 0.02
WHOLE: dict[str, Any] = {"layers": 8, "width": 512, "batch": 1, "length": 8}
TINY = RealWorkload(layers=1, width=16, batch=1, length=4)
# Wrappers rebuild their buckets in the first steps.
MEMORY_STEPS = 7
COUNTED = {
    "cpu": "in processes of its own; memory that ranks share is counted once, half for each",
    "cuda": "as torch's allocator counts it on the GPU; what NCCL takes for itself is not in it",
}


def memory_cell(name: str, repeat: int) -> Cell:
    """Of one peer, on the CPU."""
    return Cell(
        name=f"memory, {name}" + (f", run {repeat + 1}" if repeat else ""),
        warmup=0,
        rounds=MEMORY_STEPS,
        seconds=3.0,
        emulated=False,
        options={MEMORY: name, **WHOLE},
    )


def gpu_memory_cell(**options: Any) -> Cell:
    """Of all peers, one after the other."""
    cell = gpu_cell(f"memory, {ALL}", quick=True, step_seconds=0.0, options={MEMORY: ALL, **options}, emulated=False)
    return replace(cell, warmup=0, rounds=MEMORY_STEPS, block=1)


def measure_memory(rounds: Rounds) -> None:
    options = dict(rounds.cell.options)
    wanted = options.pop(MEMORY)
    workload = RealWorkload(**options, device=rounds.device)
    rounds.fact("gradient bytes", workload.nbytes)
    for peer in PEERS.values() if wanted == ALL else [PEERS[wanted]]:
        reason = peer.absent() or rounds.device.memory_unreadable()
        if reason is None:
            _measure_peer(rounds, peer, workload)
        else:
            rounds.absent(peer.name, reason)


def _measure_peer(rounds: Rounds, peer: Peer, workload: RealWorkload) -> None:
    plain_step(replace(TINY, device=rounds.device), peer)()
    gc.collect()
    rounds.meet()
    with rounds.device.memory() as memory:
        train = plain_step(workload, peer)

        def step() -> Parts:
            train()
            return {PEAK: rounds.mean(memory.take())}

        rounds.run({peer.name: step})


class Memory:
    """Bytes of a rank, run by run, by variant: the most in any step, and what the last steps need."""

    def __init__(self, records: Sequence[CellRecord]) -> None:
        self.peak: dict[str, list[float]] = {}
        self.settled: dict[str, list[float]] = {}
        self.absent: dict[str, str] = {}
        self.gradients = 0.0
        self.device = "cpu"
        for record in records:
            if MEMORY in record.cell.options:
                self._add(record)

    def _add(self, record: CellRecord) -> None:
        self.absent |= record.absent
        self.device = record.cell.device
        self.gradients = max(self.gradients, float(record.facts.get("gradient bytes", 0)))
        for variant, samples in record.samples.items():
            steps = [samples[number].parts[PEAK] for number in sorted(samples)]
            self.peak.setdefault(variant, []).append(max(steps))
            self.settled.setdefault(variant, []).append(statistics.median(steps[-LAST_STEPS:]))


def heavier(memory: Memory) -> list[str]:
    """The peers whose worst run needs less than the best of gradsync."""
    words = []
    for when, runs in (("peak", memory.peak), ("settled", memory.settled)):
        for name in SHOWN:
            if OURS in runs and name in runs and min(runs[OURS]) > (1 + SAME) * max(runs[name]):
                more = statistics.median(runs[OURS]) / statistics.median(runs[name])
                words.append(f"{when} memory, {more:.2f} of {name} ({count(len(runs[name]), 'run')})")
    return words


def memory_table(memory: Memory) -> Table:
    rows = []
    for name, peaks in memory.peak.items():
        settled, more = memory.settled[name], MISSING
        if ALONE in memory.settled and memory.gradients:
            above = statistics.median(settled) - statistics.median(memory.settled[ALONE])
            more = f"{above / memory.gradients:+.2f}"
        rows.append([name, _megabytes(peaks), _megabytes(settled), more])
    rows += [[name, reason, MISSING, MISSING] for name, reason in memory.absent.items()]
    most = max(map(len, memory.peak.values()))
    spread = "median, lowest and highest" if most > 1 else "so its noise is not known"
    return Table(
        title=f"Memory of a rank, 2 ranks, {memory.gradients / 1e6:.0f} MB of gradients",
        columns=["variant", "peak MB", "settled MB", "settled above no wrapper, in sizes of the gradients"],
        rows=rows,
        note=(
            f"Model, gradients, activations and everything the wrapper adds, {COUNTED[memory.device]}. The peak "
            "includes wrapping and the first steps, in which buckets are made anew; settled is what the last steps "
            f"need. {count(most, 'run')} a peer: {spread}."
        ),
    )


def _megabytes(runs: Sequence[float]) -> str:
    middle = f"{statistics.median(runs) / 1e6:.0f}"
    return middle if len(runs) == 1 else f"{middle} ({min(runs) / 1e6:.0f}–{max(runs) / 1e6:.0f})"
