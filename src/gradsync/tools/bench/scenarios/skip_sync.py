"""The DDP paper's skipped synchronization: gradients are averaged every n-th iteration only.

A step here is eight iterations, so that every n has whole windows in it; times are shown per iteration.
"""

from collections.abc import Sequence

from gradsync.observe.charts.canvas import INK, canvas
from gradsync.observe.charts.kinds import Series, name_ends
from gradsync.tools.bench.measure import Rounds, Step
from gradsync.tools.bench.measured import MeasuredScenario
from gradsync.tools.bench.peers import ALONE, OURS, TUNED, Gradsync, NoWrapper, Peer
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.scenario import Picture, gpu_cell, known, times_of
from gradsync.tools.bench.statistics import percent
from gradsync.tools.bench.windows import Pattern, plain_step, repeated, settle, tuned_ddp, window_step
from gradsync.tools.bench.workload import EmulatedWorkload

__all__ = ["SkipSync"]

PERIODS = (1, 2, 4, 8)
ITERATIONS = max(PERIODS)
PEERS = (TUNED, OURS)


def variant_name(peer: str, period: int) -> str:
    return f"{peer} · every {period}" if period > 1 else f"{peer} · every iteration"


class SkipSync(MeasuredScenario):
    """Synchronizing every, every second, fourth and eighth iteration."""

    name = "skip-sync"
    title = "Skipping synchronization: the gain, and where it ends"
    source = "After Li et al., PyTorch Distributed, VLDB 2020 (up to 38 % less time with NCCL, 57 % with Gloo)."
    question = "How much faster is an iteration if gradients are averaged only every n-th time?"
    baseline = variant_name(TUNED, 1)

    def cells(self, *, quick: bool) -> list[Cell]:
        rounds = 30 if quick else 100
        options = {"parameters": 200_000, "layers": 3, "seconds": 0.008}
        seconds = (rounds + 5) * 1.3
        name = "2 hosts, 400 Mbit/s"
        return [Cell(name=name, hosts=2, rate="400mbit", rounds=rounds, seconds=seconds, options=options)]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        options = {"parameters": 5_000_000, "layers": 3, "seconds": 0.01}
        counts = (2,) if quick else (2, 4)
        return [
            gpu_cell(f"{ranks} ranks, NCCL", quick=quick, ranks=ranks, step_seconds=0.9, options=options)
            for ranks in counts
        ]

    def measure(self, rounds: Rounds) -> None:
        workload = EmulatedWorkload.of(rounds)
        rounds.fact("gradient bytes", workload.nbytes)
        variants: dict[str, Step] = {ALONE: repeated(plain_step(workload, NoWrapper()), ITERATIONS)}
        wire: dict[str, float] = {}
        peers: tuple[Peer, ...] = (tuned_ddp(rounds, workload), Gradsync())
        for peer in peers:
            for period in PERIODS:
                name, windows = variant_name(peer.name, period), ITERATIONS // period
                wrapped = workload.wrap(peer, window=period)
                window = window_step(wrapped, workload.forward, count=period, pattern=Pattern.NO_SYNC)
                variants[name] = repeated(window, windows)
                if peer.name == OURS:
                    settle(window)
                wire[name] = rounds.cell.wire_seconds(workload.nbytes) * windows
        rounds.limits(compute=ALONE, wire=wire)
        rounds.run(variants)

    def note(self, record: CellRecord) -> str:
        return f"Times and bytes of {ITERATIONS} iterations."

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        return [self._picture(record, number) for number, record in enumerate(records)]

    def _picture(self, record: CellRecord, number: int) -> Picture:
        # Who is ahead at n = 1 stands beside the gain of each: a gain alone would flatter the slower.
        title = f"Averaging every eighth time saves {_gains(record)}{_compared(record)}"
        figure, (axes,) = canvas(title, panels=[record.cell.name])
        each = 1e3 / ITERATIONS
        series = [times_of(peer, [(record, variant_name(peer, n)) for n in PERIODS], each=each) for peer in PEERS]
        limits = known({float(place): record.limit(variant_name(OURS, n)) for place, n in enumerate(PERIODS)})
        least = [(place, limit * each) for place, limit in limits.items()]
        series.append(Series(label="limit", points=least, colour=INK, style="dashed"))
        name_ends(axes, [str(n) for n in PERIODS], series, form="{:.1f} ms")
        axes.set_xlabel("synchronized every n-th iteration, n")
        axes.set_ylabel("ms an iteration (median, p5–p95)")
        return Picture(slug=f"periods-{number}", title=title, figure=figure, reading=self.sentence(record))

    def sentence(self, record: CellRecord) -> str:
        saved = f"averaging every eighth iteration only saves {_gains(record)} of the time"
        return f"{record.cell.name}: {saved}{_compared(record)}."


def _gains(record: CellRecord) -> str:
    left = {peer: record.times(variant_name(peer, PERIODS[-1]), variant_name(peer, PERIODS[0])) for peer in PEERS}
    return ", ".join(f"{peer} {percent(1 - share)}" for peer, share in known(left).items())


def _compared(record: CellRecord) -> str:
    share = record.times(variant_name(OURS, PERIODS[0]), variant_name(TUNED, PERIODS[0]))
    return "" if share is None else f"; at n = 1 {OURS} takes {share:.2f} of {TUNED}'s time"
