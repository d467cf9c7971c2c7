"""Windows of micro-batches: written in four ways, as Accelerate's guide does, and averaged every n-th time.

The guide on performing gradient accumulation with Accelerate times a window on several nodes and on one: synchronizing
every micro-batch, ``no_sync`` in the wrong place, ``no_sync`` in the right place, and ``accumulate``. From its figures
(4s + c = 2.00 s, s + c = 0.91 s) one synchronization takes 0.65 of the window's computation; so it does here,
with 2 MB of gradients over 400 Mbit/s, and 60 ms of computation. Over NCCL it is 51 MB and 28 ms.

The DDP paper averages gradients every n-th iteration only. A step of ``skip-sync`` is eight iterations, so that every n
has whole windows in it; times are shown per iteration.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradsync.observe.charts.canvas import INK, limit_line
from gradsync.observe.charts.kinds import Series, draw_bars, name_ends
from gradsync.tools.bench.measure import CellRounds
from gradsync.tools.bench.peers import ALONE, DDP, OURS, TUNED, Accelerate, Gradsync, NoWrapper
from gradsync.tools.bench.record import Cell, CellRecord, percent
from gradsync.tools.bench.scenario import Scenario, Table, cell, gpu_cell, known, table_of, times_of
from gradsync.tools.bench.workload import Lineup, Pattern, best_bucket_mb, tuned_ddp

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["AccumulationScenario", "SkipSync"]

COUNT = 4
LIBRARIES = ("DDP", "Accelerate", OURS)
PERIODS = (1, 2, 4, 8)
ITERATIONS = max(PERIODS)
SKIPPING = (TUNED, OURS)


def nccl_cells(*, quick: bool, each: float, **options: Any) -> list[Cell]:
    counts = (2,) if quick else (2, 4)
    return [gpu_cell(f"{ranks} ranks, NCCL", quick=quick, ranks=ranks, each=each, options=options) for ranks in counts]


def pattern_name(peer: str, pattern: Pattern) -> str:
    return f"{peer} · {pattern}"


class AccumulationScenario(Scenario):
    """Four ways to write a window, under DDP, Accelerate and gradsync."""

    name = "accumulation"
    title = "Gradient accumulation: what each way of writing it costs"
    source = "After the timing table of Hugging Face Accelerate's guide to gradient synchronization (BERT-base, T4s)."
    question = "How much time does skipping synchronization inside a window save, and what if it is written wrongly?"
    baseline = pattern_name("DDP", Pattern.EVERY)
    slug, ylabel, height, shared = "windows", "ms a window (median, p5–p95)", 4.6, False

    def cells(self, *, quick: bool) -> list[Cell]:
        options = {"parameters": 490_000, "layers": 3, "seconds": 0.015}
        one = cell("1 host, 2 ranks, loopback", quick=quick, each=0.9, options=options)
        return [one, cell(quick=quick, each=1.8, hosts=2, rate="400mbit", options=options)]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        return nccl_cells(quick=quick, each=0.5, parameters=12_800_000, layers=3, seconds=0.007)

    def measure(self, rounds: CellRounds) -> None:
        lineup = Lineup(rounds)
        lineup.add(NoWrapper(), count=COUNT)
        bucket = best_bucket_mb(rounds, lineup.workload, tuned=False)
        for peer in (DDP(name="DDP", bucket_mb=bucket), Accelerate(bucket_mb=bucket), Gradsync()):
            for pattern in Pattern:
                lineup.add(peer, pattern_name(peer.name, pattern), count=COUNT, pattern=pattern)
        lineup.settle().run()

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        return [_by_pattern(record) for record in records]

    def message(self, records: Sequence[CellRecord]) -> str:
        """A sentence on who gains how much from no_sync that is misplaced."""
        words = [f"{peer} {gain:.1f}×" for peer, gain in _speedups(records[-1], Pattern.IMPROPER).items()]
        return f"Speedup from no_sync around backward alone: {', '.join(words)}"

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        bars = [times_of(peer, [(record, pattern_name(peer, each)) for each in Pattern]) for peer in LIBRARIES]
        draw_bars(axes, list(Pattern), bars, form="{:.0f}")
        limit = record.limit("")
        if limit is not None:
            limit_line(axes, limit * 1e3, "limit")

    def reading(self, records: Sequence[CellRecord]) -> str:
        return self.sentence(records[-1])

    def sentence(self, record: CellRecord) -> str:
        """A sentence on how much faster than the baseline each library is, with no_sync in the right place and in the
        wrong one."""
        improper = _speedups(record, Pattern.IMPROPER)
        parts = [
            f"{peer} {gain:.2f}× faster with no_sync, {improper[peer]:.2f}× when it is misplaced"
            for peer, gain in _speedups(record, Pattern.NO_SYNC).items()
            if peer in improper
        ]
        return f"{record.cell.name}, against synchronizing every micro-batch: {'; '.join(parts)}."


def _by_pattern(record: CellRecord) -> Table:
    def time(name: str) -> str | None:
        return f"{record.ms(name):.0f} ms" if name in record.samples else record.absent.get(name)

    rows = [{"": way, **{peer: time(pattern_name(peer, way)) for peer in LIBRARIES}} for way in Pattern]
    return table_of(f"{record.cell.name}: a window of {COUNT} micro-batches", rows)


def _speedups(record: CellRecord, pattern: Pattern) -> dict[str, float]:
    """How many times as fast as synchronizing every micro-batch, by peer."""
    every = {peer: pattern_name(peer, Pattern.EVERY) for peer in LIBRARIES}
    return known({peer: record.times(every[peer], pattern_name(peer, pattern)) for peer in LIBRARIES})


def period_name(peer: str, period: int) -> str:
    return f"{peer} · every {period}" if period > 1 else f"{peer} · every iteration"


class SkipSync(Scenario):
    """Synchronizing every, every second, fourth and eighth iteration."""

    name = "skip-sync"
    title = "Skipping synchronization: the gain, and where it ends"
    source = "After Li et al., PyTorch Distributed, VLDB 2020 (up to 38 % less time with NCCL, 57 % with Gloo)."
    question = "How much faster is an iteration if gradients are averaged only every n-th time?"
    baseline = period_name(TUNED, 1)
    slug, ylabel, columns, one_per_cell = "periods", "ms an iteration (median, p5–p95)", 0, True

    def cells(self, *, quick: bool) -> list[Cell]:
        options = {"parameters": 200_000, "layers": 3, "seconds": 0.008}
        return [cell(quick=quick, each=1.3, hosts=2, rate="400mbit", options=options)]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        return nccl_cells(quick=quick, each=0.9, parameters=5_000_000, layers=3, seconds=0.01)

    def measure(self, rounds: CellRounds) -> None:
        lineup = Lineup(rounds)
        lineup.add(NoWrapper(), times=ITERATIONS)
        once, sending = rounds.cell.transfer_seconds(lineup.workload.nbytes), dict[str, float]()
        for peer in (tuned_ddp(rounds, lineup.workload), Gradsync()):
            for period in PERIODS:
                name, windows = period_name(peer.name, period), ITERATIONS // period
                lineup.add(peer, name, count=period, pattern=Pattern.NO_SYNC, times=windows)
                sending[name] = once * windows
        rounds.limits(compute=ALONE, communication=sending)
        lineup.settle().run()

    def note(self, record: CellRecord) -> str:
        return f"Times and bytes of {ITERATIONS} iterations."

    def message(self, records: Sequence[CellRecord]) -> str:
        # Who is ahead at n = 1 stands beside the gain of each: a gain alone would flatter the slower.
        return f"Averaging every eighth time saves {_savings(records[0])}{_compared(records[0])}"

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        each = 1e3 / ITERATIONS
        series = [times_of(peer, [(record, period_name(peer, n)) for n in PERIODS], each=each) for peer in SKIPPING]
        limits = known({float(place): record.limit(period_name(OURS, n)) for place, n in enumerate(PERIODS)})
        least = [(place, limit * each) for place, limit in limits.items()]
        series.append(Series(label="limit", points=least, colour=INK, style="dashed"))
        name_ends(axes, [str(n) for n in PERIODS], series, form="{:.1f} ms")
        axes.set_xlabel("synchronized every n-th iteration, n")

    def sentence(self, record: CellRecord) -> str:
        saved = f"averaging every eighth iteration only saves {_savings(record)} of the time"
        return f"{record.cell.name}: {saved}{_compared(record)}."


def _savings(record: CellRecord) -> str:
    left = {peer: record.times(period_name(peer, PERIODS[-1]), period_name(peer, PERIODS[0])) for peer in SKIPPING}
    return ", ".join(f"{peer} {percent(1 - share)}" for peer, share in known(left).items())


def _compared(record: CellRecord) -> str:
    share = record.times(period_name(OURS, PERIODS[0]), period_name(TUNED, PERIODS[0]))
    return "" if share is None else f"; at n = 1 {OURS} takes {share:.2f} of {TUNED}'s time"
