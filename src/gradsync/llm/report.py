"""A run's folder as one page: ``write_report(folder)`` makes ``report.html`` from what :mod:`run_folder` wrote.

The page needs nothing but itself: no network, no font, no script file. Everything on it is computed here, in numbers
and sentences, and drawn by :mod:`charts`; the template only arranges it.

Every key is optional. Besides the records of ``metrics.jsonl`` the page knows

- of ``config.json``: ``model``, ``data``, ``ranks``, ``grad_accum``, ``parameters`` (their number);
- of ``summary.json``: ``seconds``, ``validation_loss``, ``peak_memory_bytes``, ``digest`` of the parameters and
  ``replicas_equal`` (whether all ranks have that digest).

Whatever else is in them is shown in tables as it stands. A record may stand for several steps: those since the one
before.
"""

import bisect
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gradsync.errors import ConfigurationError
from gradsync.llm.charts import (
    Bar,
    Line,
    Segment,
    compact,
    duration,
    line_chart,
    share_bar,
    size,
    stacked_chart,
    thin,
    timeline_chart,
    y_axis,
)
from gradsync.llm.run_folder import Run, read_run, write_whole

__all__ = ["write_report"]

PHASES = ("data", "forward", "backward", "synchronization", "update")
# The widths charts are drawn for: the whole column, half of it (and a telephone), a telephone where the column is not.
FULL, HALF, NARROW = 928, 448, 448
COLUMNS = 120
# What the figures and charts say already, and what has a table of its own.
SAID = {"seconds", "peak_memory_bytes", "replicas_equal", "shares", "step", "signal"}
SAID |= {"tokens_per_second", "first_loss", "final_loss", "validation_loss"}
NAMES = {"None": "–", "True": "yes", "False": "no"}
FACTS = ("versions", "torch", "python", "cuda", "machine", "device", "devices", "host")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number that stands for the run, and a line to read it by."""

    label: str
    value: str
    detail: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing with a sentence below. ``narrow`` replaces it on a small screen, where it is given."""

    slug: str
    title: str
    reading: str
    wide: Sequence[str]
    narrow: Sequence[str] = ()


def write_report(run_folder: Path) -> Path:
    """Makes the page from what the folder holds by now, and returns its path."""
    run = read_run(Path(run_folder))
    template = _environment().get_template("report.html")
    page: str = template.render(
        run=run,
        model=_name_of(run.config.get("model"), "language model"),
        data=_name_of(run.config.get("data"), ""),
        setting=_setting(run),
        figures=list(_figures(run)),
        charts=[chart for draw in (_loss, _throughput, _norm, _rate, _time, _timeline) for chart in draw(run)],
        missing=[name for name, there in (("validation", run.validations), ("timeline", run.timelines)) if not there],
        tables=[(title, rows) for title, rows in _tables(run) if rows],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = Path(run_folder) / "report.html"
    write_whole(path, page)
    return path


def _environment() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ConfigurationError(
            f"the report needs the package jinja2 ({error}). Install it with pip install 'gradsync[train]'."
        ) from error
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Only for what charts.py drew: it has escaped its words itself.
    environment.filters["drawn"] = markupsafe.Markup
    return environment


def _name_of(value: Any, otherwise: str) -> str:
    if isinstance(value, Mapping):
        value = value.get("name") or ", ".join(f"{key} {entry}" for key, entry in value.items())
    return str(value) if value else otherwise


def _setting(run: Run) -> str:
    ranks, accumulation, parameters = (run.config.get(key) for key in ("ranks", "grad_accum", "parameters"))
    words = [] if ranks is None else [_count(ranks, "rank")]
    if accumulation is not None:
        words.append(_count(accumulation, "micro-batch", "es") + " a step")
    return " × ".join(words) + (f" · {compact(parameters)} parameters" if parameters else "")


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def _figures(run: Run) -> Iterator[Figure]:
    losses = [loss for _, loss in run.series("loss")]
    if losses and not math.isfinite(losses[-1]):
        yield Figure(label="final loss", value="not finite", detail="NaN or infinite", tone="bad")
    elif losses:
        first, final = next(loss for loss in losses if math.isfinite(loss)), losses[-1]
        fell = f"{'down' if final <= first else 'up'} {abs(first - final):.3g} from {first:.4g}"
        yield Figure(label="final loss", value=f"{final:.3f}", detail=fell if len(losses) > 1 else "one record")
    if run.validations:
        step, loss = run.validations[-1]["step"], float(run.validations[-1]["loss"])
        detail = f"perplexity {math.exp(loss):.4g}, " if loss < 20 else ""
        value = f"{loss:.3f}" if math.isfinite(loss) else "not finite"
        yield Figure(label="validation loss", value=value, detail=f"{detail}step {step:,}")
    speeds = [speed for _, speed in run.series("tokens_per_second") if math.isfinite(speed)]
    if speeds:
        tokens = sum(count for _, count in run.series("tokens"))
        detail = f"median; {compact(tokens)} tokens in all" if tokens else "median"
        yield Figure(label="tokens per second", value=compact(float(f"{statistics.median(speeds):.3g}")), detail=detail)
    if run.steps:
        yield Figure(label="time", value=duration(_seconds(run)), detail=_count(run.count, "step"))
    totals = _totals(run)
    if totals:
        share = totals["synchronization"] / sum(totals.values())
        detail = "of the time, not hidden behind backward"
        yield Figure(label="lost to synchronization", value=f"{share:.1%}", detail=detail)
    if run.summary.get("peak_memory_bytes"):
        yield Figure(label="peak memory", value=size(run.summary["peak_memory_bytes"]), detail="on rank 0")
    yield from _replicas(run)


def _replicas(run: Run) -> Iterator[Figure]:
    equal, digest = run.summary.get("replicas_equal"), str(run.summary.get("digest", "unknown"))[:12]
    if equal is False:
        detail = "replicas do not hold the same parameters: do not use this model"
        yield Figure(label="replicas", value="differ", detail=detail, tone="bad")
    elif equal and run.config.get("ranks") == 1:
        yield Figure(label="replicas", value="one", detail=f"parameters have the digest {digest}")
    elif equal:
        detail = f"all replicas hold the same parameters, digest {digest}"
        yield Figure(label="replicas", value="identical", detail=detail, tone="good")


def _seconds(run: Run) -> float:
    total, before = 0.0, 0.0
    for _, now in run.series("time"):
        # The clock of a resumed run may begin at 0 again.
        total += now - before if now >= before else now
        before = now
    # The summary knows what came after the last step, but of a resumed run only the last part.
    return max(total, float(run.summary.get("seconds") or 0.0))


def _totals(run: Run) -> dict[str, float]:
    """Seconds by phase over all steps; empty where none were recorded."""
    totals = {phase: math.fsum(_phases(record)[phase] for record in run.steps) for phase in PHASES}
    return totals if sum(totals.values()) > 0 else {}


def _phases(record: Mapping[str, Any]) -> dict[str, float]:
    seconds = record.get("seconds") or {}
    values = {phase: float(seconds.get(phase) or 0.0) for phase in PHASES}
    return {phase: value if math.isfinite(value) and value > 0 else 0.0 for phase, value in values.items()}


def _loss(run: Run) -> Iterator[Chart]:
    raw = run.series("loss")
    checks = [(float(record["step"]), float(record["loss"])) for record in run.validations]
    if not raw and not checks:
        return
    lines = _smoothed("training", raw, "loss")
    if checks:
        lines.append(Line(name="validation", points=checks, color="validation", style="dots"))
    hover = [
        (x, f"step {x:,.0f}: loss {y:.4f}" if math.isfinite(y) else f"step {x:,.0f}: not finite") for x, y in thin(raw)
    ]
    yield _lines("loss", "Loss", lines, "loss, nats per token", _loss_reading(raw, checks), hover, half=False)


def _smoothed(name: str, points: list[tuple[float, float]], color: str) -> list[Line]:
    """A line; of many points a smooth one in front of the points."""
    if len(points) < 60:
        return [Line(name=name, points=points, color=color)]
    return [
        Line(name="each record", points=points, color=color, style="faint"),
        Line(name=f"{name}, smoothed" if name else "smoothed", points=_smooth(points), color=color),
    ]


def _smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of the middle half of each point's neighbours: smoother than a median, and no wild step bends it."""
    window: list[float] = []
    smooth, begin, end = [], 0, 0
    for index, (x, y) in enumerate(points):
        # As far ahead as back, so that the line lies in the middle of a steep beginning too.
        reach = min(index, len(points) // 30, 250)
        for _, value in points[end : index + reach + 1]:
            if math.isfinite(value):
                bisect.insort(window, value)
        for _, value in points[begin : index - reach]:
            if math.isfinite(value):
                window.pop(bisect.bisect_left(window, value))
        begin, end = index - reach, index + reach + 1
        middle = window[len(window) // 4 : len(window) - len(window) // 4]
        smooth.append((x, statistics.fmean(middle) if math.isfinite(y) else math.nan))
    return smooth


def _loss_reading(raw: Sequence[tuple[float, float]], checks: Sequence[tuple[float, float]]) -> str:
    finite = [(step, loss) for step, loss in raw if math.isfinite(loss)]
    words = []
    if len(finite) == 1:
        words.append(f"There is one record, with a loss of {finite[0][1]:.4g}.")
    elif finite:
        first, final, tail = finite[0][1], finite[-1][1], finite[-10:]
        mean = f"; the last ten records average {statistics.fmean(loss for _, loss in tail):.4g}" if finite[20:] else ""
        words.append(f"The training loss went from {first:.4g} to {final:.4g}{mean}.")
        middle = (first + final) / 2
        halfway = next((step for step, loss in _smooth(finite) if loss <= middle < first), None)
        if len(finite) >= 20 and halfway is not None:
            words.append(f"Half of that fall was done by step {halfway:,.0f}.")
    measured = [(loss, step) for step, loss in checks if math.isfinite(loss)]
    if len(measured) > 1:
        (lowest, step), last = min(measured), measured[-1][0]
        later = ", the last" if last == lowest else f"; the last is {last - lowest:.2g} above it"
        words.append(f"The lowest validation loss, {lowest:.4g}, was measured at step {step:,.0f}{later}.")
    gaps = [step for step, loss in raw if not math.isfinite(loss)]
    if gaps:
        records = _count(len(gaps), "record")
        words.append(f"The loss was not finite in {records}, first at step {gaps[0]:,.0f}: there the line has a gap.")
    return " ".join(words)


def _throughput(run: Run) -> Iterator[Chart]:
    points = run.series("tokens_per_second")
    finite = sorted(speed for _, speed in points if math.isfinite(speed))
    if not finite:
        return
    speed, step = min((speed, step) for step, speed in points if math.isfinite(speed))
    reading = f"The median is {compact(float(f'{statistics.median(finite):.3g}'))} tokens per second over all ranks"
    if len(finite) >= 4:
        low, high = (float(f"{finite[len(finite) * part // 4]:.3g}") for part in (1, 3))
        reading += f"; half of the steps lie between {compact(low)} and {compact(high)}"
        reading += f". The slowest, step {step:,.0f}, made {compact(float(f'{speed:.3g}'))}"
    yield _simple("throughput", "Throughput", points, "tokens per second", reading + ".", half=False)


def _norm(run: Run) -> Iterator[Chart]:
    points = run.series("gradient_norm")
    finite = [(norm, step) for step, norm in points if math.isfinite(norm)]
    if not finite:
        return
    largest, step = max(finite)
    reading = f"The median is {statistics.median(norm for norm, _ in finite):.3g}"
    reading += f", the largest {largest:.3g} at step {step:,.0f}."
    gaps = len(points) - len(finite)
    if gaps:
        reading += f" It was not finite in {_count(gaps, 'record')}, a gap in the line."
    yield _simple("norm", "Gradient norm", points, "norm before clipping", reading)


def _rate(run: Run) -> Iterator[Chart]:
    points = run.series("learning_rate")
    if not points:
        return
    largest, step = max((rate, -step) for step, rate in points)
    reading = f"It peaks at {compact(largest)} in step {-step:,.0f} and ends at {compact(points[-1][1])}."
    if largest == min(rate for _, rate in points):
        reading = f"It is {compact(largest)} throughout."
    yield _simple("rate", "Learning rate", points, "learning rate", reading)


def _simple(
    slug: str, title: str, points: list[tuple[float, float]], unit: str, reading: str, *, half: bool = True
) -> Chart:
    hover = [(x, f"step {x:,.0f}: {compact(y)}") for x, y in thin(points)]
    lines = [Line(name=title, points=points, color=slug)] if slug == "rate" else _smoothed("", points, slug)
    return _lines(slug, title, lines, unit, reading, hover, half=half)


def _lines(
    slug: str,
    title: str,
    lines: Sequence[Line],
    unit: str,
    reading: str,
    hover: Sequence[tuple[float, str]],
    *,
    half: bool,
) -> Chart:
    top = y_axis(lines, zero=slug != "loss")[0][1]
    beyond = sum(top < y < math.inf for _, y in lines[0].points)
    if beyond:
        lie, triangles = ("lies", "triangle") if beyond == 1 else ("lie", "triangles")
        reading += f" {_count(beyond, 'outlier')} {lie} beyond the axis ({triangles} at the top)."

    def draw(width: int, height: int) -> str:
        return line_chart(
            slug=slug,
            title=f"{title} over steps",
            description=reading,
            lines=lines,
            y_label=unit,
            width=width,
            height=height,
            zero=slug != "loss",
            hover=hover,
        )

    if half:
        return Chart(slug=slug, title=title, reading=reading, wide=[draw(HALF, 220)])
    height = 340 if slug == "loss" else 220
    return Chart(slug=slug, title=title, reading=reading, wide=[draw(FULL, height)], narrow=[draw(NARROW, height - 20)])


def _time(run: Run) -> Iterator[Chart]:
    totals = _totals(run)
    if not totals:
        return
    whole = sum(totals.values())
    timed = [record for record in run.steps if sum(_phases(record).values()) > 0]
    per_column = math.ceil(len(timed) / COLUMNS)
    columns = [timed[begin : begin + per_column] for begin in range(0, len(timed), per_column)]
    edges = [timed[0]["step"] - run.stride + 0.5, *(column[-1]["step"] + 0.5 for column in columns)]
    sums = [{phase: sum(_phases(record)[phase] for record in column) for phase in PHASES} for column in columns]
    segments = [
        Segment(
            name=phase,
            color=phase,
            share=totals[phase] / whole,
            label=f"{totals[phase] / whole:.1%} · {duration(totals[phase] / run.count)}",
            columns=[column[phase] / (sum(column.values()) or 1.0) for column in sums],
        )
        for phase in PHASES
    ]
    hover = [
        ((edges[number] + edges[number + 1]) / 2, f"to step {column[-1]['step']:,}: " + _shares(sums[number]))
        for number, column in enumerate(columns)
    ]
    largest = max(segments, key=lambda segment: segment.share)
    reading = (
        f"A step takes {duration(whole / run.count)} on average. The largest part of it is {largest.name}, "
        f"{largest.share:.0%}. Exposed synchronization takes {totals['synchronization'] / whole:.1%}."
    )
    if per_column * run.stride > 1:
        reading += f" Each column stands for {per_column * run.stride} steps."

    def draw(width: int, height: int) -> list[str]:
        title = "Where the time went, over all steps"
        bar = share_bar(slug="shares", title=title, description=reading, segments=segments, width=width)
        title = "Where the time of each step went"
        columns = {"edges": edges, "segments": segments, "hover": hover}
        return [
            bar,
            stacked_chart(slug="time", title=title, description=reading, width=width, height=height, **columns),
        ]

    yield Chart(
        slug="time", title="Where the time went", reading=reading, wide=draw(FULL, 250), narrow=draw(NARROW, 240)
    )


def _shares(seconds: Mapping[str, float]) -> str:
    whole = sum(seconds.values()) or 1.0
    return ", ".join(f"{phase} {value / whole:.0%}" for phase, value in seconds.items())


def _timeline(run: Run) -> Iterator[Chart]:
    known = [(record, _bars(record)) for record in run.timelines if record.get("backward")]
    known = [(record, bars) for record, bars in known if bars]
    if not known:
        return
    record, bars = known[-1]
    begin, end = record["backward"]
    wire, hidden = _covered(bars, math.inf), _covered(bars, end)
    reading = (
        f"In step {record['step']:,} backward took {duration(end - begin)}. Buckets were on the wire for "
        f"{duration(wire)}, of which {duration(hidden)} ({hidden / wire:.0%}) were hidden behind backward and "
        f"{duration(wire - hidden)} came after it."
    )
    if len(known) > 1:
        middle = statistics.median(_covered(b, r["backward"][1]) / _covered(b, math.inf) for r, b in known)
        reading += f" Over the {len(known)} steps recorded, the median is {middle:.0%} hidden."

    def draw(width: int) -> list[str]:
        title = f"Buckets of step {record['step']:,}"
        backward = (float(begin), float(end))
        return [
            timeline_chart(slug="timeline", title=title, description=reading, bars=bars, backward=backward, width=width)
        ]

    yield Chart(slug="timeline", title="Buckets of one step", reading=reading, wide=draw(FULL), narrow=draw(NARROW))


def _bars(record: Mapping[str, Any]) -> list[Bar]:
    """The buckets that were seen from start to finish, in the order they went."""
    bars = []
    for bucket in record["buckets"]:
        start, finish = bucket.get("start"), bucket.get("finish")
        if start is None or finish is None or finish <= start:
            continue
        ready = start if bucket.get("ready") is None else min(bucket["ready"], start)
        name = f"{bucket['bucket']} · {size(bucket.get('bytes') or 0)}"
        hint = f"bucket {name}: ready at {duration(ready)}, on the wire from {duration(start)} to "
        bars.append(Bar(name=name, ready=ready, start=start, finish=finish, hint=hint + duration(finish)))
    return sorted(bars, key=lambda bar: bar.start)


def _covered(bars: Sequence[Bar], until: float) -> float:
    """Seconds before ``until`` in which at least one bucket was on the wire."""
    total, reached = 0.0, -math.inf
    for bar in sorted(bars, key=lambda bar: bar.start):
        begin, end = max(bar.start, reached), min(bar.finish, until)
        total += max(0.0, end - begin)
        reached = max(reached, end)
    return total


def _tables(run: Run) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    both = {**run.config, **run.summary}
    yield "Configuration", list(_rows({key: value for key, value in run.config.items() if key not in FACTS}))
    yield "Versions and machine", list(_rows({key: both[key] for key in FACTS if key in both}))
    yield "Summary", list(_rows({key: value for key, value in run.summary.items() if key not in SAID.union(FACTS)}))


def _rows(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, int) and not isinstance(value, bool)
            words = f"{value:,}" if plain else NAMES.get(str(value), str(value))
            yield f"{prefix}{key}".replace("_", " "), words
