"""Tables, pictures and words of the scenario ``peers``, from its records.

Where gradsync is behind a peer, the words say so: in time if the whole interval of the ratio lies above 1, in bytes,
which hardly vary, if it sends 2 % more, in memory if it needs 2 % more in its best run than the peer in its worst.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gradsync.bench.record import LIMITS, CellRecord
from gradsync.bench.scenario import ALONE, MISSING, OURS, TUNED, Picture, Table, colour_of, timing_table
from gradsync.bench.statistics import percent
from gradsync.charts.canvas import canvas, colour, limit_line
from gradsync.charts.kinds import draw_rows
from gradsync.charts.words import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MEMORY", "PEAK", "read", "show_pictures", "show_tables"]

STOCK = "DDP stock"
# From the top down.
SHOWN = (OURS, TUNED, STOCK, "Accelerate", "Lightning Fabric", "FSDP2 replicate", "naive")
# A cell with this option measures memory; its samples have this part.
MEMORY, PEAK = "memory", "peak bytes"
# Of those that measure memory.
LAST_STEPS = 3
# Bytes and memory within this share of each other are the same.
SAME = 0.02


def show_tables(records: Sequence[CellRecord]) -> list[Table]:
    tables = [_table(record) for record in _timed(records)]
    return [*tables, _memory_table(records)] if _peaks(records) else tables


def show_pictures(records: Sequence[CellRecord]) -> list[Picture]:
    timed = _timed(records)
    emulated = [record for record in timed if record.cell.emulated]
    real = [record for record in timed if not record.cell.emulated]
    pictures = []
    if emulated:
        pictures.append(_time_picture("links", emulated))
        hosts = [record for record in emulated if record.cell.hosts is not None]
        pictures += [_bytes_picture(hosts)] if hosts else []
    if real:
        pictures.append(_time_picture("real", real))
    if _peaks(records):
        pictures.append(_memory_picture(records))
    return pictures


def read(records: Sequence[CellRecord]) -> str:
    sentences = [sentence for record in _timed(records) if (sentence := _lead(record))]
    behind = [words for record in _timed(records) for words in _behind(record)] + _heavier(records)
    if behind:
        sentences.append(f"gradsync is behind in: {'; '.join(behind)}.")
    elif sentences:
        sentences.append("No peer is ahead of gradsync in time, bytes or memory by more than the noise.")
    return " ".join(sentences) or "There is nothing to compare yet."


# -- numbers ----------------------------------------------------------------------------------------------------------


def _timed(records: Sequence[CellRecord]) -> list[CellRecord]:
    return [record for record in records if MEMORY not in record.cell.options]


def _peaks(records: Sequence[CellRecord]) -> dict[str, list[float]]:
    """The most bytes of a rank in any step, run by run, by variant."""
    return {variant: [max(steps) for steps in runs] for variant, runs in _memory(records).items()}


def _settled(records: Sequence[CellRecord]) -> dict[str, list[float]]:
    """What the last steps of a rank need, run by run, by variant."""
    return {
        variant: [statistics.median(steps[-LAST_STEPS:]) for steps in runs]
        for variant, runs in _memory(records).items()
    }


def _memory(records: Sequence[CellRecord]) -> dict[str, list[list[float]]]:
    runs: dict[str, list[list[float]]] = {}
    for record in records:
        if MEMORY in record.cell.options:
            for variant, samples in record.samples.items():
                runs.setdefault(variant, []).append([samples[number].parts[PEAK] for number in sorted(samples)])
    return runs


def _rivals(record: CellRecord) -> list[str]:
    return [name for name in SHOWN if name in record.samples and name != OURS]


def _exposed(record: CellRecord, variant: str) -> float | None:
    """Median over the rounds of what the step takes longer than the computation alone."""
    alone, mine = record.samples.get(ALONE, {}), record.samples[variant]
    waits = [sample.seconds - alone[number].seconds for number, sample in mine.items() if number in alone]
    return statistics.median(waits) if waits else None


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
    """Where a peer of this cell is ahead, outside the noise."""
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


def _heavier(records: Sequence[CellRecord]) -> list[str]:
    """The peers whose worst run needs less than the best of gradsync."""
    words = []
    for when, known in (("peak", _peaks(records)), ("settled", _settled(records))):
        for name in SHOWN:
            if OURS in known and name in known and min(known[OURS]) > (1 + SAME) * max(known[name]):
                more = statistics.median(known[OURS]) / statistics.median(known[name])
                words.append(f"{when} memory, {more:.2f} of {name} ({count(len(known[name]), 'run')})")
    return words


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(record: CellRecord) -> Table:
    def exposed(name: str) -> str:
        waited = _exposed(record, name)
        return MISSING if waited is None or name == ALONE else f"{waited * 1e3:.1f}"

    table = timing_table(record, baseline=OURS, note=_bucket_note(record), more={"exposed ms": exposed})
    kind = "emulated computation" if record.cell.emulated else "real computation"
    title = f"{record.cell.name}: {_size(record)} of gradients, {kind} ({record.rounds} rounds)"
    return replace(table, title=title)


def _size(record: CellRecord) -> str:
    return f"{record.facts.get('gradient bytes', 0) / 1e6:.1f} MB"


def _bucket_note(record: CellRecord) -> str:
    tuned = record.facts.get("DDP bucket MiB")
    if tuned is None:
        return ""
    small = record.facts.get("gradient bytes", 0) < 25 * 2**20
    whole = " DDP stock, Accelerate and Lightning Fabric have buckets of 25 MiB, which hold this model whole."
    return f"Buckets of DDP tuned, in MiB: {tuned}.{whole if small else ''}"


def _memory_table(records: Sequence[CellRecord]) -> Table:
    peaks, settled = _peaks(records), _settled(records)
    cells = [record for record in records if MEMORY in record.cell.options]
    gradients = max((float(record.facts.get("gradient bytes", 0)) for record in cells), default=0.0)
    rows = []
    for name in peaks:
        more = MISSING
        if ALONE in settled and gradients:
            more = f"{(statistics.median(settled[name]) - statistics.median(settled[ALONE])) / gradients:+.2f}"
        rows.append([name, _megabytes(peaks[name]), _megabytes(settled[name]), more])
    absent = {name: reason for record in cells for name, reason in record.absent.items()}
    rows += [[name, reason, MISSING, MISSING] for name, reason in absent.items()]
    most = max(map(len, peaks.values()))
    spread = "median, lowest and highest" if most > 1 else "so its noise is not known"
    return Table(
        title=f"Memory of a rank, 1 host, 2 ranks, {gradients / 1e6:.0f} MB of gradients",
        columns=["variant", "peak MB", "settled MB", "settled above no wrapper, in sizes of the gradients"],
        rows=rows,
        note=(
            "Model, gradients, activations and everything the wrapper adds, in processes of its own; memory that ranks "
            "share is counted once, half for each. The peak includes wrapping and the first steps, in which buckets "
            f"are made anew; settled is what the last steps need. {count(most, 'run')} a peer: {spread}."
        ),
    )


def _megabytes(runs: Sequence[float]) -> str:
    middle = f"{statistics.median(runs) / 1e6:.0f}"
    return middle if len(runs) == 1 else f"{middle} ({min(runs) / 1e6:.0f}–{max(runs) / 1e6:.0f})"


# -- pictures ---------------------------------------------------------------------------------------------------------


def _time_picture(slug: str, records: Sequence[CellRecord]) -> Picture:
    title = _time_message(records)
    figure, axes = canvas(title, panels=[record.cell.name for record in records], height=3.9)
    for panel, record in zip(axes, records, strict=True):
        _bars(panel, record.absent, {name: record.summary(name).median * 1e3 for name in record.samples}, "{:.0f}")
        if ALONE in record.samples:
            # What is left of colour is the cost of synchronization.
            alone = record.summary(ALONE).median * 1e3
            known = [place for place, name in enumerate(SHOWN) if name in record.samples]
            panel.barh(known, [alone] * len(known), 0.7, color=colour("palest"))
        limit = record.limit(OURS)
        if limit is not None and LIMITS in record.facts:
            limit_line(panel, limit * 1e3, across=False)
        panel.set_xlabel("ms a step")
    words = " ".join(sentence for record in records if (sentence := _lead(record)))
    legend = "Grey is the computation without a wrapper, the dashed line the limit."
    return Picture(slug=slug, title=title, figure=figure, reading=f"{words} {legend}")


def _bytes_picture(records: Sequence[CellRecord]) -> Picture:
    shares = [percent(_share_sent(record)) for record in records if {OURS, STOCK} <= record.samples.keys()]
    title = f"Bytes of gradsync against stock DDP{_in_order(shares)}" if shares else "Bytes that a host sends"
    figure, axes = canvas(title, panels=[record.cell.name for record in records], height=3.7)
    for panel, record in zip(axes, records, strict=True):
        _bars(panel, record.absent, {name: record.sent(name) / 1e6 for name in record.samples}, "{:.2f}")
        panel.set_xlabel("MB a step, sent by a host")
    reading = "Read from the counters of the hosts' interfaces; where a host has two ranks, both send through one link."
    return Picture(slug="bytes", title=title, figure=figure, reading=reading)


def _memory_picture(records: Sequence[CellRecord]) -> Picture:
    cells = [record for record in records if MEMORY in record.cell.options]
    runs = {"Peak, first steps included": _peaks(records), "Settled": _settled(records)}
    known = {
        when: {name: statistics.median(values) for name, values in variants.items()} for when, variants in runs.items()
    }
    title = _memory_message(known["Settled"])
    absent = {name: reason for record in cells for name, reason in record.absent.items()}
    figure, axes = canvas(title, panels=list(known), height=3.7)
    for panel, values in zip(axes, known.values(), strict=True):
        _bars(panel, absent, {name: value / 1e6 for name, value in values.items()}, "{:.0f}")
        if ALONE in values:
            limit_line(panel, values[ALONE] / 1e6, across=False)
        panel.set_xlabel(f"MB a rank, {_size(cells[0])} of gradients")
    reading = "The dashed line is the model without a wrapper. Memory that ranks share is counted once."
    return Picture(slug="memory", title=title, figure=figure, reading=reading)


def _memory_message(settled: dict[str, float]) -> str:
    rivals = {name: size for name, size in settled.items() if name in SHOWN and name != OURS}
    if OURS not in settled or not rivals:
        return "Memory of a rank"
    best = min(rivals, key=lambda name: rivals[name])
    mine, other = f"gradsync {settled[OURS] / 1e6:.0f} MB a rank", f"{best} {rivals[best] / 1e6:.0f} MB"
    return f"Memory in the long run: {mine}; the best other, {other}"


def _time_message(records: Sequence[CellRecord]) -> str:
    # Not stock: where its one bucket holds a scaled model whole, it is easily beaten.
    gains = [f"{times:.2f}×" for record in records if (times := record.times(TUNED, OURS)) is not None]
    return f"Speed of gradsync against tuned DDP{_in_order(gains)}" if gains else "Time of a step"


def _in_order(values: Sequence[str]) -> str:
    """Values of the panels, as the end of a title."""
    return f"{', from left to right' if len(values) > 1 else ''}: {', '.join(values)}"


def _bars(panel: "Axes", absent: Mapping[str, str], known: Mapping[str, float], form: str) -> None:
    """One bar a peer, from the top down; or why it has none."""
    rows = {name: known.get(name, absent.get(name, MISSING)) for name in SHOWN}
    draw_rows(panel, rows, {name: colour_of(name) for name in SHOWN}, form=form, bold=OURS)
