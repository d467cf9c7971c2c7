"""Accelerate's table: a window of four micro-batches, written in four ways, under three libraries.

The guide on performing gradient accumulation with Accelerate times a window on several nodes and on one: synchronizing
every micro-batch, ``no_sync`` in the wrong place, ``no_sync`` in the right place, and ``accumulate``. From its figures
(4s + c = 2.00 s, s + c = 0.91 s) one synchronization takes 0.65 of the window's computation; so it does here,
with 2 MB of gradients over 400 Mbit/s, and 60 ms of computation.
"""

from collections.abc import Sequence

from gradsync.bench.measure import Rounds, Step
from gradsync.bench.peers import DDP, Accelerate, Gradsync, NoWrapper, Peer
from gradsync.bench.record import EVERY, Cell, CellRecord
from gradsync.bench.scenario import ALONE, MISSING, Picture, Table, times_of, timing_table
from gradsync.bench.tuning import best_bucket_mb
from gradsync.bench.windows import Pattern, settle, window_step
from gradsync.bench.workload import Workload
from gradsync.charts.canvas import canvas, legend, limit_line
from gradsync.charts.kinds import draw_bars
from gradsync.lab.profile import transformer

__all__ = ["Accumulation"]

COUNT = 4
PEERS = ("DDP", "Accelerate", "gradsync")
NO_SUCH = "does not exist"


def variant_name(peer: str, pattern: Pattern) -> str:
    return f"{peer} · {pattern}"


class Accumulation:
    """Four ways to write a window, under DDP, Accelerate and gradsync."""

    name = "accumulation"
    title = "Gradient accumulation: what each way of writing it costs"
    source = "After the timing table of Hugging Face Accelerate's guide to gradient synchronization (BERT-base, T4s)."
    question = "How much time does skipping synchronization inside a window save, and what if it is written wrongly?"

    def cells(self, *, quick: bool) -> list[Cell]:
        rounds = 30 if quick else 100
        options = {"parameters": 490_000, "layers": 3, "seconds": 0.015}
        seconds = (rounds + 5) * 0.9
        return [
            Cell(name="1 host, 2 ranks, loopback", rounds=rounds, seconds=seconds, options=options),
            Cell(
                name="2 hosts, 400 Mbit/s", hosts=2, rate="400mbit", rounds=rounds, seconds=seconds * 2, options=options
            ),
        ]

    def measure(self, rounds: Rounds) -> None:
        workload = Workload(profile=transformer(**rounds.cell.options))
        rounds.fact("gradient bytes", workload.nbytes)
        rounds.limits(compute=ALONE, wire={EVERY: workload.wire_seconds(rounds.cell)})
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
                    rounds.absent(name, NO_SUCH)
                    continue
                variants[name] = window_step(wrapped, workload.forward, count=COUNT, pattern=pattern)
        for pattern in Pattern:
            settle(variants[variant_name(PEERS[-1], pattern)], windows=COUNT if pattern is Pattern.EVERY else 1)
        rounds.run(variants)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        overview = [self._overview(record) for record in records]
        return overview + [timing_table(record, baseline=variant_name("DDP", Pattern.EVERY)) for record in records]

    def _overview(self, record: CellRecord) -> Table:
        rows = []
        for pattern in Pattern:
            row = [str(pattern)]
            for peer in PEERS:
                name = variant_name(peer, pattern)
                known = name in record.samples
                row.append(f"{record.summary(name).median * 1e3:.0f} ms" if known else record.absent.get(name, MISSING))
            rows.append(row)
        title = f"{record.cell.name}: a window of {COUNT} micro-batches"
        return Table(title=title, columns=["", *PEERS], rows=rows)

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        title = _message(records[-1])
        figure, axes = canvas(title, panels=[record.cell.name for record in records], height=4.6, shared=False)
        for panel, record in zip(axes, records, strict=True):
            bars = [times_of(peer, [(record, variant_name(peer, each)) for each in Pattern]) for peer in PEERS]
            draw_bars(panel, list(Pattern), bars, form="{:.0f}")
            limit = record.limit("")
            if limit is not None:
                limit_line(panel, limit * 1e3, "limit")
        axes[0].set_ylabel("ms a window (median, p5–p95)")
        legend(axes)
        reading = " ".join(_saving(record) for record in records)
        return [Picture(slug="windows", title=title, figure=figure, reading=reading)]

    def reading(self, records: Sequence[CellRecord]) -> str:
        return _saving(records[-1])


def _faster(record: CellRecord, peer: str, pattern: Pattern) -> float | None:
    """How many times as fast as synchronizing every micro-batch."""
    return record.times(variant_name(peer, Pattern.EVERY), variant_name(peer, pattern))


def _message(record: CellRecord) -> str:
    """The title: who gains how much from no_sync that is misplaced."""
    gains = {peer: _faster(record, peer, Pattern.IMPROPER) for peer in PEERS}
    words = [f"{peer} {gain:.1f}×" for peer, gain in gains.items() if gain is not None]
    return f"Speedup from no_sync around backward alone: {', '.join(words)}"


def _saving(record: CellRecord) -> str:
    """How much faster than the baseline each library is, with no_sync in the right place and in the wrong one."""
    parts = []
    for peer in PEERS:
        proper, improper = (_faster(record, peer, pattern) for pattern in (Pattern.NO_SYNC, Pattern.IMPROPER))
        if proper is not None and improper is not None:
            parts.append(f"{peer} {proper:.2f}× faster with no_sync, {improper:.2f}× when it is misplaced")
    return f"{record.cell.name}, against synchronizing every micro-batch: {'; '.join(parts)}."
