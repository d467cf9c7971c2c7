"""Every wrapper people use today, over several links: its time, what it exposes, its bytes and its memory.

Between hosts the computation is emulated, so that ranks do not compete for this machine's cores; on one host two real
transformers are trained as well, one that mostly communicates and one that mostly computes.

Memory is measured in separate cells. On the CPU every peer has its own, with ranks that hold nothing else: their use is
the process's proportional set size. On a GPU torch's allocator counts, starting from what is allocated before the peer
wraps its model, so the peers follow one another in the ranks of one cell. Each first wraps and steps a tiny model, so
that imports and first uses are not counted.

Where gradsync is behind a peer, the text says so: in time if the whole interval of the ratio is above 1, in bytes,
which hardly vary, if it sends 2 % more, in memory if it needs 2 % more in its best run than the peer in its worst.
"""

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gradsync.observe.charts.canvas import colour, limit_line
from gradsync.observe.charts.kinds import draw_rows
from gradsync.observe.charts.numbers import count
from gradsync.tools.bench.measure import CellRounds, Parts, Step
from gradsync.tools.bench.peers import ALONE, OURS, PEERS, STOCK, TUNED, Peer
from gradsync.tools.bench.record import Cell, CellRecord, percent
from gradsync.tools.bench.scenario import (
    MISSING,
    ROUNDS,
    Picture,
    Scenario,
    Table,
    cell,
    colour_of,
    gpu_cell,
    known,
    paper_cells,
    picture,
    table_of,
    timing_table,
)
from gradsync.tools.bench.workload import MIB, Lineup, RealWorkload, Workload, tuned_ddp, window_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Peers"]

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


def measure_memory(rounds: CellRounds) -> None:
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


def _measure_peer(rounds: CellRounds, peer: Peer, workload: RealWorkload) -> None:
    _train(replace(TINY, device=rounds.device), peer)()
    gc.collect()
    rounds.meet()
    with rounds.device.memory() as memory:
        train = _train(workload, peer)

        def step() -> Parts:
            train()
            return {PEAK: rounds.mean(memory.take())}

        rounds.run({peer.name: step})


def _train(workload: Workload, peer: Peer) -> Step:
    return window_step(workload.wrap(peer), workload.forward)


class Memory:
    """Bytes of a rank, run by run, by variant: the most in any step, and what the last steps need."""

    def __init__(self, records: Sequence[CellRecord]) -> None:
        self.peak: dict[str, list[float]] = {}
        self.settled: dict[str, list[float]] = {}
        measured = [record for record in records if MEMORY in record.cell.options]
        for record in measured:
            for variant, samples in record.samples.items():
                steps = [samples[number].parts[PEAK] for number in sorted(samples)]
                self.peak.setdefault(variant, []).append(max(steps))
                self.settled.setdefault(variant, []).append(statistics.median(steps[-LAST_STEPS:]))
        self.absent = {name: reason for record in measured for name, reason in record.absent.items()}
        self.gradients = max((float(record.facts.get("gradient bytes", 0)) for record in measured), default=0.0)
        self.counted = COUNTED[measured[-1].cell.device] if measured else ""

    def heavier(self) -> list[str]:
        """Sentences on the peers whose worst run needs less than the best of gradsync."""
        words = []
        for when, runs in (("peak", self.peak), ("settled", self.settled)):
            for name in SHOWN:
                if OURS in runs and name in runs and min(runs[OURS]) > (1 + SAME) * max(runs[name]):
                    more = statistics.median(runs[OURS]) / statistics.median(runs[name])
                    words.append(f"{when} memory, {more:.2f} of {name} ({count(len(runs[name]), 'run')})")
        return words

    def table(self) -> Table:
        def row(name: str) -> dict[str, object]:
            more = None
            if ALONE in self.settled and self.gradients:
                above = statistics.median(self.settled[name]) - statistics.median(self.settled[ALONE])
                more = f"{above / self.gradients:+.2f}"
            return {
                "variant": name,
                "peak MB": _megabytes(self.peak[name]),
                "settled MB": _megabytes(self.settled[name]),
                "settled above no wrapper, in sizes of the gradients": more,
            }

        most = max(map(len, self.peak.values()))
        spread = "median, lowest and highest" if most > 1 else "so its noise is not known"
        return table_of(
            f"Memory of a rank, 2 ranks, {self.gradients / 1e6:.0f} MB of gradients",
            map(row, self.peak),
            absent=self.absent,
            note=f"Model, gradients, activations and everything the wrapper adds, {self.counted}. The peak includes "
            "wrapping and the first steps, in which buckets are made anew; settled is what the last steps need. "
            f"{count(most, 'run')} a peer: {spread}.",
        )

    def picture(self) -> Picture:
        def draw(axes: "Axes", runs: Mapping[str, list[float]]) -> None:
            sizes = {name: statistics.median(values) / 1e6 for name, values in runs.items()}
            xlabel = f"MB a rank, {self.gradients / 1e6:.1f} MB of gradients"
            _bars(axes, sizes, self.absent, form="{:.0f}", xlabel=xlabel, limit=sizes.get(ALONE))

        title, rivals = "Memory of a rank", [name for name in self.settled if name in SHOWN and name != OURS]
        if OURS in self.settled and rivals:
            settled = {name: statistics.median(values) / 1e6 for name, values in self.settled.items()}
            best = min(rivals, key=lambda name: settled[name])
            other = f"the best other, {best} {settled[best]:.0f} MB"
            title = f"Memory in the long run: gradsync {settled[OURS]:.0f} MB a rank; {other}"
        both = (("Peak, first steps included", self.peak), ("Settled", self.settled))
        panels = [(when, partial(draw, runs=runs)) for when, runs in both]
        reading = "The dashed line is the model without a wrapper. Memory that ranks share is counted once."
        return picture("memory", title, panels, reading=reading, height=3.7, columns=0)


def _megabytes(runs: Sequence[float]) -> str:
    middle = f"{statistics.median(runs) / 1e6:.0f}"
    return middle if len(runs) == 1 else f"{middle} ({min(runs) / 1e6:.0f}–{max(runs) / 1e6:.0f})"


# Rounds of a cell whose times spread, against those of the others.
MORE = 1.5
# Model and computation of the emulated cells; what is sent takes about as long as what is computed.
SMALL = {"layers": 2, "seconds": 0.02}
SLOW_PARAMETERS, FAST_PARAMETERS = 300_000, 750_000
# Computed for real, on a GPU: with the smaller batch it mostly communicates.
GPU_WHOLE: dict[str, Any] = {"layers": 8, "width": 512, "batch": 8, "length": 256}
# Allocators keep more or less of what is freed, so one run says little about a few percent.
MEMORY_RUNS = 5


class Peers(Scenario):
    """gradsync beside naive averaging, torch's DDP, Accelerate, Lightning Fabric and FSDP2's replicate."""

    name = "peers"
    title = "Peers: the same model under every wrapper"
    source = "The wrappers of torch 2.13, Accelerate and Lightning Fabric, as their documentation uses them."
    question = "Which wrapper costs least: time, bytes sent, memory?"

    def cells(self, *, quick: bool) -> list[Cell]:
        cells = _emulated(quick=quick) + _real(quick=quick)
        return cells + [
            Cell(
                name=f"memory, {name}" + (f", run {repeat + 1}" if repeat else ""),
                warmup=0,
                rounds=MEMORY_STEPS,
                seconds=3.0,
                emulated=False,
                options={MEMORY: name, **WHOLE},
            )
            for repeat in range(1 if quick else MEMORY_RUNS)
            for name in PEERS
        ]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        cells = paper_cells(quick=quick, steps=10)[:1]
        for batch, seconds in ((8, 0.3), (32, 0.4)):
            options = {**GPU_WHOLE, "batch": batch}
            name = f"{RealWorkload(**options).parameters / 1e6:.0f}M, batch {batch}, NCCL"
            cells.append(gpu_cell(name, quick=quick, each=seconds, emulated=False, options=options))
        options = {MEMORY: ALL, **GPU_WHOLE}
        memory = gpu_cell(f"memory, {ALL}", quick=True, each=0.0, emulated=False, options=options)
        return [*cells, replace(memory, warmup=0, rounds=MEMORY_STEPS, block=1)]

    def measure(self, rounds: CellRounds) -> None:
        if MEMORY in rounds.cell.options:
            measure_memory(rounds)
        else:
            _measure_time(rounds)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        memory = Memory(records)
        return [_table(record) for record in _timed(records)] + ([memory.table()] if memory.peak else [])

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        timed, memory = _timed(records), Memory(records)
        emulated = [record for record in timed if record.cell.emulated]
        hosts = [record for record in emulated if record.cell.hosts is not None]
        real = [record for record in timed if not record.cell.emulated]
        pictures = [_time_picture("links", emulated)] if emulated else []
        pictures += [_bytes_picture(hosts)] if hosts else []
        pictures += [_time_picture("real", real)] if real else []
        return pictures + ([memory.picture()] if memory.peak else [])

    def reading(self, records: Sequence[CellRecord]) -> str:
        sentences = [sentence for record in _timed(records) if (sentence := _lead(record))]
        behind = [words for record in _timed(records) for words in _behind(record)] + Memory(records).heavier()
        if behind:
            sentences.append(f"gradsync is behind in: {'; '.join(behind)}.")
        elif sentences:
            sentences.append("No peer is ahead of gradsync in time, bytes or memory by more than the noise.")
        return " ".join(sentences) or "There is nothing to compare yet."


def _emulated(*, quick: bool) -> list[Cell]:
    larger = 1 if quick else 4
    slow = {**SMALL, "parameters": SLOW_PARAMETERS * larger, "seconds": SMALL["seconds"] * larger}
    fast = {**slow, "parameters": FAST_PARAMETERS * larger}
    each: dict[str, Any] = {"quick": quick, "each": 0.4 * larger, "start": 4.0 * larger}
    two = cell(hosts=2, rate="400mbit", options=slow, **each)
    # Four ranks on a machine with fewer cores are less regular.
    rounds = round(two.rounds * MORE)
    crowded = replace(two, name="2×2 ranks, 400 Mbit/s", ranks=4, rounds=rounds, seconds=two.seconds * 1.5 * MORE)
    if quick:
        # Two real cells stand for one host in a quick run.
        return [two, crowded]
    one = cell("1 host, 2 ranks", options=fast, **each)
    return [one, two, cell(hosts=2, rate="1gbit", options=fast, **each), crowded]


def _real(*, quick: bool) -> list[Cell]:
    heavy: dict[str, Any] = {**WHOLE, "layers": 6, "width": 256} if quick else WHOLE
    light: dict[str, Any] = {"layers": 4, "width": 128, "batch": 1, "length": 64}
    # Short steps are less regular.
    longer = round(ROUNDS[0] * MORE), round(ROUNDS[1] * MORE)
    return [
        cell(
            f"1 host, {RealWorkload(**options).parameters / 1e6:.1f}M parameters",
            quick=quick,
            each=seconds,
            start=10 * seconds,
            rounds=rounds,
            emulated=False,
            options=options,
        )
        for options, rounds, seconds in ((heavy, ROUNDS, 0.6 if quick else 2.0), (light, longer, 0.35))
    ]


def _measure_time(rounds: CellRounds) -> None:
    # The ranks of a host can add up among themselves before anything crosses its link.
    lineup = Lineup(rounds, senders=rounds.cell.hosts or 1)
    # DDP tuned has its trials; settling is where gradsync makes its own choice of buckets.
    for peer in {**PEERS, TUNED: tuned_ddp(rounds, lineup.workload)}.values():
        lineup.add(peer)
    lineup.settle().run()


# -- numbers ----------------------------------------------------------------------------------------------------------


def _timed(records: Sequence[CellRecord]) -> list[CellRecord]:
    return [record for record in records if MEMORY not in record.cell.options]


def _rivals(record: CellRecord) -> list[str]:
    return [name for name in SHOWN if name in record.samples and name != OURS]


def _share_sent(record: CellRecord) -> float:
    return record.sent(OURS) / max(record.sent(STOCK), 1.0)


def _lead(record: CellRecord) -> str:
    rivals = _rivals(record)
    if OURS not in record.samples or not rivals:
        return ""
    best = min(rivals, key=lambda name: record.summary(name).median)
    names = [STOCK, best] if STOCK in rivals and best != STOCK else [best]
    faster = " and ".join(f"{record.ratio(name, OURS).median:.2f}× {name}" for name in names)
    limit = record.limit(OURS)
    near = "" if limit is None else f", a step takes {record.summary(OURS).median / limit:.2f} of the limit"
    sent = ""
    if record.cell.hosts is not None and STOCK in rivals and _share_sent(record) < 1 - SAME:
        sent = f", with {percent(_share_sent(record))} of the bytes of {STOCK}"
    return f"{record.cell.name}: the speed of gradsync is {faster} (the best other){near}{sent}."


def _behind(record: CellRecord) -> list[str]:
    """Sentences on where a peer of this cell is ahead, outside the noise."""
    if OURS not in record.samples:
        return []
    words = []
    for name in _rivals(record):
        slower = record.ratio(OURS, name)
        if slower.low > 1:
            words.append(f"time, {record.cell.name}, {slower} of {name}")
    lightest = min(_rivals(record), key=record.sent, default=None)
    if record.cell.hosts is not None and lightest is not None:
        more = record.sent(OURS) / max(record.sent(lightest), 1.0)
        if more > 1 + SAME:
            words.append(f"bytes, {record.cell.name}, {more:.2f} of {lightest}")
    return words


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(record: CellRecord) -> Table:
    alone, size = record.samples.get(ALONE, {}), record.facts.get("gradient bytes", 0)

    def exposed(name: str) -> str | None:
        """Median over the rounds of what the step takes longer than the computation alone."""
        waits = [taken.seconds - alone[n].seconds for n, taken in record.samples[name].items() if n in alone]
        return f"{statistics.median(waits) * 1e3:.1f}" if waits and name != ALONE else None

    note = ""
    if "DDP bucket MiB" in record.facts:
        whole = " DDP stock, Accelerate and Lightning Fabric have buckets of 25 MiB, which hold this model whole."
        note = f"Buckets of DDP tuned, in MiB: {record.facts['DDP bucket MiB']}.{whole if size < 25 * MIB else ''}"
    table = timing_table(record, baseline=OURS, note=note, more={"exposed ms": exposed})
    kind = "emulated computation" if record.cell.emulated else "real computation"
    title = f"{record.cell.name}: {size / 1e6:.1f} MB of gradients, {kind} ({record.rounds} rounds)"
    return replace(table, title=title)


# -- pictures ---------------------------------------------------------------------------------------------------------


def _bars(
    axes: "Axes",
    values: Mapping[str, float],
    absent: Mapping[str, str],
    *,
    form: str,
    xlabel: str,
    grey: float | None = None,
    limit: float | None = None,
) -> None:
    """Draw one bar a peer, from the top down, or why it has none; a part of it ``grey``, and a ``limit``."""
    rows = {name: values.get(name, absent.get(name, MISSING)) for name in SHOWN}
    draw_rows(axes, rows, {name: colour_of(name) for name in SHOWN}, form=form, bold=OURS)
    if grey is not None:
        places = [place for place, name in enumerate(SHOWN) if name in values]
        axes.barh(places, [grey] * len(places), 0.7, color=colour("palest"))
    if limit is not None:
        limit_line(axes, limit, across=False)
    axes.set_xlabel(xlabel)


def _time_picture(slug: str, records: Sequence[CellRecord]) -> Picture:
    # Not stock: where its one bucket holds a scaled model whole, it is easily beaten.
    gains = known({record.cell.name: record.times(TUNED, OURS) for record in records}).values()
    title = _title("Speed of gradsync against tuned DDP", [f"{times:.2f}×" for times in gains]) or "Time of a step"

    def draw(axes: "Axes", record: CellRecord) -> None:
        times, limit = {name: record.ms(name) for name in record.samples}, record.limit(OURS)
        bound = None if limit is None else limit * 1e3
        # What is left of colour is the cost of synchronization.
        grey = times.get(ALONE)
        _bars(axes, times, record.absent, form="{:.0f}", xlabel="ms a step", grey=grey, limit=bound)

    words = " ".join(sentence for record in records if (sentence := _lead(record)))
    reading = f"{words} Grey is the computation without a wrapper, the dashed line the limit."
    panels = [(record.cell.name, partial(draw, record=record)) for record in records]
    return picture(slug, title, panels, reading=reading, height=3.9, columns=0)


def _bytes_picture(records: Sequence[CellRecord]) -> Picture:
    shares = [percent(_share_sent(record)) for record in records if {OURS, STOCK} <= record.samples.keys()]
    title = _title("Bytes of gradsync against stock DDP", shares) or "Bytes that a host sends"

    def draw(axes: "Axes", record: CellRecord) -> None:
        sent = {name: record.sent(name) / 1e6 for name in record.samples}
        _bars(axes, sent, record.absent, form="{:.2f}", xlabel="MB a step, sent by a host")

    panels = [(record.cell.name, partial(draw, record=record)) for record in records]
    reading = "Read from the counters of the hosts' interfaces; where a host has two ranks, both send through one link."
    return picture("bytes", title, panels, reading=reading, height=3.7, columns=0)


def _title(words: str, values: Sequence[str]) -> str:
    """A title with the values of the panels, if there are any."""
    order = ", from left to right" if len(values) > 1 else ""
    return f"{words}{order}: {', '.join(values)}" if values else ""
