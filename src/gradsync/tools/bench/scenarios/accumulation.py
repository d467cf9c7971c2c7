"""Accelerate's table: a window of four micro-batches, written in four ways, under three libraries.

The guide on performing gradient accumulation with Accelerate times a window on several nodes and on one: synchronizing
every micro-batch, ``no_sync`` in the wrong place, ``no_sync`` in the right place, and ``accumulate``. From its figures
(4s + c = 2.00 s, s + c = 0.91 s) one synchronization takes 0.65 of the window's computation; so it does here,
with 2 MB of gradients over 400 Mbit/s, and 60 ms of computation. Over NCCL it is 51 MB and 28 ms.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gradsync.observe.charts.canvas import limit_line
from gradsync.observe.charts.kinds import draw_bars
from gradsync.tools.bench.measure import Rounds, Step
from gradsync.tools.bench.measured import MeasuredScenario
from gradsync.tools.bench.peers import ALONE, DDP, OURS, Accelerate, Gradsync, NoWrapper, Peer
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.scenario import MISSING, Table, gpu_cell, known, times_of
from gradsync.tools.bench.windows import Pattern, best_bucket_mb, settle, window_step
from gradsync.tools.bench.workload import EmulatedWorkload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Accumulation"]

COUNT = 4
PEERS = ("DDP", "Accelerate", OURS)


def variant_name(peer: str, pattern: Pattern) -> str:
    return f"{peer} · {pattern}"


class Accumulation(MeasuredScenario):
    """Four ways to write a window, under DDP, Accelerate and gradsync."""

    name = "accumulation"
    title = "Gradient accumulation: what each way of writing it costs"
    source = "After the timing table of Hugging Face Accelerate's guide to gradient synchronization (BERT-base, T4s)."
    question = "How much time does skipping synchronization inside a window save, and what if it is written wrongly?"
    baseline = variant_name("DDP", Pattern.EVERY)
    slug, ylabel, height, shared = "windows", "ms a window (median, p5–p95)", 4.6, False

    def cells(self, *, quick: bool) -> list[Cell]:
        rounds = 30 if quick else 100
        options = {"parameters": 490_000, "layers": 3, "seconds": 0.015}
        one = Cell(name="1 host, 2 ranks, loopback", rounds=rounds, seconds=(rounds + 5) * 0.9, options=options)
        return [one, replace(one, name="2 hosts, 400 Mbit/s", hosts=2, rate="400mbit", seconds=one.seconds * 2)]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        options = {"parameters": 12_800_000, "layers": 3, "seconds": 0.007}
        counts = (2,) if quick else (2, 4)
        return [
            gpu_cell(f"{ranks} ranks, NCCL", quick=quick, ranks=ranks, step_seconds=0.5, options=options)
            for ranks in counts
        ]

    def measure(self, rounds: Rounds) -> None:
        workload = EmulatedWorkload.of(rounds)
        workload.note(rounds)
        alone = window_step(workload.wrap(NoWrapper()), workload.forward, count=COUNT, pattern=Pattern.EVERY)
        variants: dict[str, Step] = {ALONE: alone}
        bucket = best_bucket_mb(rounds, workload, tuned=False)
        peers: tuple[Peer, ...] = (DDP(name="DDP", bucket_mb=bucket), Accelerate(bucket_mb=bucket), Gradsync())
        for peer in peers:
            reason = peer.absent()
            for pattern in Pattern:
                name = variant_name(peer.name, pattern)
                if reason is not None:
                    rounds.absent(name, reason)
                    continue
                wrapped = workload.wrap(peer, window=COUNT)
                if pattern is Pattern.ACCUMULATE and wrapped.accumulate is None:
                    rounds.absent(name, "does not exist")
                    continue
                variants[name] = window_step(wrapped, workload.forward, count=COUNT, pattern=pattern)
        for pattern in Pattern:
            settle(variants[variant_name(OURS, pattern)], windows=COUNT if pattern is Pattern.EVERY else 1)
        rounds.run(variants)

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        return [
            Table(
                title=f"{record.cell.name}: a window of {COUNT} micro-batches",
                columns=["", *PEERS],
                rows=[
                    [pattern, *(_time(record, variant_name(peer, pattern)) for peer in PEERS)] for pattern in Pattern
                ],
            )
            for record in records
        ]

    def message(self, records: Sequence[CellRecord]) -> str:
        """Who gains how much from no_sync that is misplaced."""
        words = [f"{peer} {gain:.1f}×" for peer, gain in _gains(records[-1], Pattern.IMPROPER).items()]
        return f"Speedup from no_sync around backward alone: {', '.join(words)}"

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        bars = [times_of(peer, [(record, variant_name(peer, each)) for each in Pattern]) for peer in PEERS]
        draw_bars(axes, list(Pattern), bars, form="{:.0f}")
        limit = record.limit("")
        if limit is not None:
            limit_line(axes, limit * 1e3, "limit")

    def reading(self, records: Sequence[CellRecord]) -> str:
        return self.sentence(records[-1])

    def sentence(self, record: CellRecord) -> str:
        """How much faster than the baseline each library is, with no_sync in the right place and in the wrong one."""
        improper = _gains(record, Pattern.IMPROPER)
        parts = [
            f"{peer} {gain:.2f}× faster with no_sync, {improper[peer]:.2f}× when it is misplaced"
            for peer, gain in _gains(record, Pattern.NO_SYNC).items()
            if peer in improper
        ]
        return f"{record.cell.name}, against synchronizing every micro-batch: {'; '.join(parts)}."


def _time(record: CellRecord, variant: str) -> str:
    return f"{record.ms(variant):.0f} ms" if variant in record.samples else record.absent.get(variant, MISSING)


def _gains(record: CellRecord, pattern: Pattern) -> dict[str, float]:
    """How many times as fast as synchronizing every micro-batch, by peer."""
    return known({peer: record.times(variant_name(peer, Pattern.EVERY), variant_name(peer, pattern)) for peer in PEERS})
