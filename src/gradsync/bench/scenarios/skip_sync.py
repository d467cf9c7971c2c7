"""The DDP paper's skipped synchronization: gradients are averaged every n-th iteration only.

A step here is eight iterations, so that every n has whole windows in it; times are shown per iteration.
"""

from collections.abc import Sequence

from gradsync.bench.measure import Rounds, Step
from gradsync.bench.peers import DDP, Gradsync, NoWrapper, Peer
from gradsync.bench.plots import INK, Series, canvas, draw_lines
from gradsync.bench.record import Cell, CellRecord
from gradsync.bench.scenario import Picture, Table, timing_table
from gradsync.bench.statistics import percent
from gradsync.bench.tuning import best_bucket_mb
from gradsync.bench.windows import Pattern, settle, window_step
from gradsync.bench.workload import Workload
from gradsync.lab.profile import transformer

__all__ = ["SkipSync"]

PERIODS = (1, 2, 4, 8)
ITERATIONS = max(PERIODS)
ALONE = "no wrapper"
PEERS = ("DDP tuned", "gradsync")


def variant_name(peer: str, period: int) -> str:
    return f"{peer} · every {period}" if period > 1 else f"{peer} · every iteration"


class SkipSync:
    """Synchronizing every, every second, fourth and eighth iteration."""

    name = "skip-sync"
    title = "Skipping synchronization: the gain, and where it ends"
    source = "After Li et al., PyTorch Distributed, VLDB 2020 (up to 38 % less time with NCCL, 57 % with Gloo)."
    question = "How much faster is an iteration if gradients are averaged only every n-th time?"

    def cells(self, *, quick: bool) -> list[Cell]:
        rounds = 30 if quick else 100
        options = {"parameters": 200_000, "layers": 3, "seconds": 0.008}
        cell = Cell(
            name="2 hosts, 400 Mbit/s",
            hosts=2,
            rate="400mbit",
            rounds=rounds,
            seconds=(rounds + 5) * 1.3,
            options=options,
        )
        return [cell]

    def measure(self, rounds: Rounds) -> None:
        workload = Workload(profile=transformer(**rounds.cell.options))
        rounds.fact("gradient bytes", workload.nbytes)
        alone = window_step(workload.wrap(NoWrapper()), workload.forward, count=1, pattern=Pattern.EVERY)
        variants: dict[str, Step] = {ALONE: _repeated(alone, ITERATIONS)}
        wire: dict[str, float] = {}
        tuned = DDP(name="DDP tuned", tuned=True, bucket_mb=best_bucket_mb(rounds, workload))
        peers: tuple[Peer, ...] = (tuned, Gradsync())
        for peer in peers:
            for period in PERIODS:
                name = variant_name(peer.name, period)
                wrapped = workload.wrap(peer, window=period)
                window = window_step(wrapped, workload.forward, count=period, pattern=Pattern.NO_SYNC)
                variants[name] = _repeated(window, ITERATIONS // period)
                if peer.name == PEERS[-1]:
                    settle(window)
                wire[name] = workload.wire_seconds(rounds.cell, synchronizations=ITERATIONS // period)
        rounds.limits(compute=ALONE, wire=wire)
        rounds.run(variants)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        note = f"Times and bytes of {ITERATIONS} iterations."
        return [timing_table(record, baseline=variant_name("DDP tuned", 1), note=note) for record in records]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        return [_picture(record, number) for number, record in enumerate(records)]

    def reading(self, records: Sequence[CellRecord]) -> str:
        return " ".join(_saving(record) for record in records)


def _repeated(step: Step, times: int) -> Step:
    def repeated() -> None:
        for _ in range(times):
            step()

    return repeated


def _picture(record: CellRecord, number: int) -> Picture:
    title = _message(record)
    figure, (axes,) = canvas(title, panels=[record.cell.name], height=4.2)
    series = [_series(record, peer) for peer in PEERS]
    limits = [record.limit(variant_name(PEERS[-1], period)) for period in PERIODS]
    least = [None if limit is None else limit / ITERATIONS * 1e3 for limit in limits]
    series.append(Series(label="limit", values=least, colour=INK, dashed=True))
    draw_lines(axes, [str(period) for period in PERIODS], series, form="{:.1f} ms")
    axes.set_xlabel("synchronized every n-th iteration, n")
    axes.set_ylabel("ms an iteration (median, p5–p95)")
    return Picture(slug=f"periods-{number}", title=title, figure=figure, reading=_saving(record))


def _message(record: CellRecord) -> str:
    """The title: the gain of each, and who is ahead at n = 1. A gain alone would flatter the slower."""
    return f"Averaging every eighth time saves {', '.join(_gains(record))}{_compared(record)}"


def _gains(record: CellRecord) -> list[str]:
    gains = []
    for peer in PEERS:
        first, last = variant_name(peer, PERIODS[0]), variant_name(peer, PERIODS[-1])
        if first in record.samples and last in record.samples:
            gains.append(f"{peer} {percent(1 - record.ratio(last, first).median)}")
    return gains


def _compared(record: CellRecord) -> str:
    theirs, ours = (variant_name(peer, PERIODS[0]) for peer in PEERS)
    if theirs not in record.samples or ours not in record.samples:
        return ""
    return f"; at n = 1 {PEERS[1]} takes {record.ratio(ours, theirs).median:.2f} of {PEERS[0]}'s time"


def _series(record: CellRecord, peer: str) -> Series:
    values: list[float | None] = []
    spans: list[tuple[float, float] | None] = []
    for period in PERIODS:
        name = variant_name(peer, period)
        summary = record.summary(name) if name in record.samples else None
        each = 1e3 / ITERATIONS
        values.append(None if summary is None else summary.median * each)
        spans.append(None if summary is None else (summary.p5 * each, summary.p95 * each))
    return Series(label=peer, values=values, spans=spans)


def _saving(record: CellRecord) -> str:
    gains = ", ".join(_gains(record))
    return f"{record.cell.name}: averaging every eighth iteration only saves {gains} of the time{_compared(record)}."
