"""A scenario: one question, the cells and variants that answer it, and how the answer is shown.

=============  ===================================================================================================
cells          one run of ranks each: :func:`cell` and :func:`gpu_cell` name one by its place and tell its time
variants       what takes turns in a cell: a ``Lineup`` wraps a model for every peer, settles it and runs the rounds
tables         :func:`table_of` rows, each a value for every column; :func:`timing_table` of a cell
pictures       panels, drawn by the kinds of ``charts``: one per cell, unless ``panels`` says otherwise
=============  ===================================================================================================

To add one, write a subclass in a file of ``scenarios/`` and name it in the list there::

    class MyScenario(Scenario):
        name, title = "my-scenario", "What it is about"
        source = "where the question comes from"
        question = "what a user wants to know"
        baseline = "DDP tuned"
        slug, ylabel = "steps", "ms a step"

        def cells(self, *, quick: bool) -> list[Cell]:
            options = {"parameters": 200_000, "layers": 3, "seconds": 0.01}
            return [cell(quick=quick, each=0.3, hosts=2, rate=rate, options=options) for rate in ("400mbit", "1gbit")]

        def measure(self, rounds: CellRounds) -> None:
            lineup = Lineup(rounds)
            for peer in (NoWrapper(), tuned_ddp(rounds, lineup.workload), Gradsync()):
                lineup.add(peer)
            lineup.settle().run()

        def draw(self, axes: "Axes", record: CellRecord) -> None:
            draw_rows(axes, {name: record.ms(name) for name in record.samples}, ...)

``measure`` runs inside every rank of a cell, on an existing process group. A scenario that starts its own processes and
observes them from outside implements ``drive`` instead, which runs a cell and writes its samples. One that can also be
measured over NCCL has ``gpu_cells``, and takes its models and times from ``rounds.device``.

``tables``, ``pictures`` and ``reading`` get the cells that have samples, and must accept that some variants are
missing.
"""

import logging
import os
import statistics
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from gradsync.observe.charts.canvas import SOFT, canvas, colour, legend
from gradsync.observe.charts.kinds import Series
from gradsync.tools.bench.measure import DEVICES, CellRounds, Progress
from gradsync.tools.bench.peers import ALONE, OURS, TUNED
from gradsync.tools.bench.record import LIMITS, Cell, CellRecord, RowFile
from gradsync.tools.lab.gpu import SharedGpu, fork_gpu_ranks
from gradsync.tools.lab.host import read_counters
from gradsync.tools.lab.lab import Lab, fork_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "MISSING",
    "Picture",
    "Scenario",
    "Table",
    "cell",
    "colour_of",
    "gpu_cell",
    "known",
    "link_words",
    "or_missing",
    "paper_cells",
    "paper_models",
    "picture",
    "spread",
    "table_of",
    "times_of",
    "timing_table",
]

Key = TypeVar("Key")

MISSING = "–"
GROUP_TIMEOUT = timedelta(seconds=120)
# Rounds of a cell, in a quick run and in a full one.
ROUNDS = (30, 100)
# Of cells over NCCL: steps of a block, blocks, and what ranks take to start. What is chosen before the first block, as
# bucket sizes are, takes about as long as this many steps of all variants.
GPU_BLOCK, GPU_WARMUP, GPU_ROUNDS = 3, 1, 8
GPU_START_SECONDS, GPU_CHOOSING = 6.0, 15
# Seconds of forward and backward for which gradients, over sockets on one machine, take about as long as backward.
GPU_SECONDS = {"ResNet-50": 0.06, "BERT-base": 0.25}
# BERT-base of a quick run is smaller, and faster as much.
QUICK_SCALES = {"ResNet-50": 1.0, "BERT-base": 0.4}
# A peer has the same colour in every picture, and gradsync is always the blue.
COLOURS = {
    OURS: "blue",
    "gradsync elastic": "sky",
    "torchft": "pink",
    "DDP stock": "orange",
    TUNED: "vermillion",
    "Accelerate": "green",
    "Lightning Fabric": "pink",
    "FSDP2 replicate": "sky",
    "naive": "dark-grey",
    "bucketed": "light-grey",
    ALONE: "grey",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as it is shown: text in rows and columns, the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure and the sentence to read it by. The ``slug`` names its files, ``svg`` is what a page shows of it."""

    slug: str
    title: str
    figure: "Figure" = field(repr=False)
    reading: str
    svg: str = field(default="", repr=False)


class Scenario(ABC):
    """One question about the cost of synchronization."""

    name: str
    title: str
    source: str
    question: str
    # The variant that tables hold the others against.
    baseline: str
    # For the picture with one panel per cell, or for those of one cell each.
    slug: str
    ylabel: str = ""
    height: float = 4.2
    # Of the legend; 0 for none.
    columns = 5
    one_per_cell = False
    # Its rounds are trials, each by itself: a run that goes on in a folder of results measures those that are missing,
    # and --peers, --jobs and --minutes are for them.
    in_trials = False
    shared: bool = True

    @abstractmethod
    def cells(self, *, quick: bool) -> list[Cell]: ...

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        """The cells over NCCL, for two ranks and more, wherever these find their GPUs; none, if it is for CPU ranks."""
        return []

    def measure(self, rounds: CellRounds) -> None:
        """What each rank of a cell does, on a process group that is there already."""
        raise NotImplementedError(f"{self.name} has neither measure() nor drive() of its own; write one of them")

    def drive(self, cell: Cell, place: Lab | SharedGpu | None, rows: RowFile, progress: Progress) -> None:
        """Fork the ranks of the cell, and have each of them measure."""
        rank = partial(self._live, cell, rows, progress)
        times, more = DEVICES[cell.device].patience
        timeout = cell.seconds * times + more
        if isinstance(place, SharedGpu):
            fork_gpu_ranks(place, rank, timeout=timeout)
        else:
            fork_ranks(place, rank, ranks_per_host=cell.ranks_per_host, timeout=timeout)

    def _live(self, cell: Cell, rows: RowFile, progress: Progress) -> None:
        """The life of a rank."""
        # Remarks of peers about the machine would run through the line of the progress.
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        device = DEVICES[cell.device]()
        facts = device.open()
        dist.init_process_group(device.backend, timeout=GROUP_TIMEOUT)
        rounds = CellRounds(cell, rows, progress=progress, meter=lambda: read_counters(interface).sent, device=device)
        for name, value in facts.items():
            rounds.fact(name, value)
        self.measure(rounds)
        dist.destroy_process_group()

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        """The overview, and the times of every cell."""
        times = [timing_table(record, baseline=self.baseline, note=self.note(record)) for record in records]
        return self.overview(records) + times

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        return []

    def note(self, record: CellRecord) -> str:
        """What a reader of a cell's times has to know."""
        return ""

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        if self.one_per_cell:
            return [self._picture(f"{self.slug}-{number}", [record]) for number, record in enumerate(records)]
        return [self._picture(self.slug, records)]

    def _picture(self, slug: str, records: Sequence[CellRecord]) -> Picture:
        panels = [(record.cell.name, partial(self.draw, record=record)) for record in records]
        reading = Scenario.reading(self, records)
        looks: dict[str, Any] = {"ylabel": self.ylabel, "height": self.height, "shared": self.shared}
        return picture(slug, self.message(records), panels, reading=reading, columns=self.columns, **looks)

    def message(self, records: Sequence[CellRecord]) -> str:
        """The title of the picture: what it shows, in numbers."""
        return self.title

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        """The panel of a cell."""
        raise NotImplementedError(f"{self.name} has neither draw() nor pictures() of its own; write one of them")

    def reading(self, records: Sequence[CellRecord]) -> str:
        return " ".join(words for record in records if (words := self.sentence(record)))

    def sentence(self, record: CellRecord) -> str:
        """What a cell says."""
        return ""


def cell(
    label: str = "",
    *,
    name: str = "",
    quick: bool,
    each: float,
    start: float = 0.0,
    rounds: tuple[int, int] = ROUNDS,
    warmup: int = 5,
    hosts: int | None = None,
    rate: str | None = None,
    **others: Any,
) -> Cell:
    """A cell of CPU ranks, with a ``name``, or named by its ``label`` and its hosts and links.

    ``each`` is about what one round of all its variants takes, after ``start`` seconds; ``rounds`` are those of a quick
    run and of a full one.
    """
    place = "" if hosts is None else f"{hosts} hosts, {link_words(rate)}"
    count = rounds[0 if quick else 1]
    return Cell(
        name=name or ", ".join(filter(None, [label, place])),
        hosts=hosts,
        rate=rate,
        warmup=warmup,
        rounds=count,
        seconds=(count + warmup) * each + start,
        **others,
    )


def link_words(rate: str | None) -> str:
    """The rate of a link as people write it."""
    if rate is None:
        return "unshaped"
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def gpu_cell(label: str, *, quick: bool, each: float, ranks: int = 2, **others: Any) -> Cell:
    """A cell over NCCL, in blocks of steps. ``each`` is about what one step of all its variants takes."""
    rounds = GPU_ROUNDS if quick else 3 * GPU_ROUNDS
    steps = (GPU_WARMUP + rounds) * GPU_BLOCK + GPU_CHOOSING
    fixed: dict[str, Any] = {"device": "cuda", "warmup": GPU_WARMUP, "rounds": rounds, "block": GPU_BLOCK}
    return Cell(name=label, ranks=ranks, seconds=GPU_START_SECONDS + steps * each, **fixed, **others)


def paper_models(*, quick: bool) -> list[dict[str, Any]]:
    """The models of the DDP paper as options of cells over NCCL, where communication takes half of a backward."""
    scales = {model: QUICK_SCALES[model] if quick else 1.0 for model in GPU_SECONDS}
    return [
        {"model": model, "parameters": scale, "seconds": GPU_SECONDS[model] * scale} for model, scale in scales.items()
    ]


def paper_cells(*, quick: bool, steps: float, more: Mapping[str, Mapping[str, Any]] | None = None) -> list[Cell]:
    """A cell over NCCL for each model of the DDP paper, with ``more`` options by model. All variants take ``steps``
    times as long as a step's computation."""
    return [
        gpu_cell(
            f"{options['model']}, 2 ranks, NCCL",
            quick=quick,
            each=steps * options["seconds"],
            options={**options, **(more or {}).get(options["model"], {})},
        )
        for options in paper_models(quick=quick)
    ]


def picture(
    slug: str,
    title: str,
    panels: "Sequence[tuple[str, Callable[[Axes], object]]]",
    *,
    reading: str,
    ylabel: str = "",
    columns: int = 5,
    **looks: Any,
) -> Picture:
    """A figure with panels side by side, each drawn by its function, and one legend with ``columns``, if any."""
    figure, axes = canvas(title, panels=[name for name, _ in panels], **looks)
    for each, (_, draw) in zip(axes, panels, strict=True):
        draw(each)
    axes[0].set_ylabel(ylabel or axes[0].get_ylabel())
    if columns:
        legend(axes, columns=columns)
    return Picture(slug=slug, title=title, figure=figure, reading=reading)


def colour_of(name: str) -> str:
    """A peer's own colour, also where a setting is added to its name."""
    known = [key for key in COLOURS if name == key or name.startswith(f"{key} ")]
    return colour(COLOURS[max(known, key=len)]) if known else SOFT


def known(values: Mapping[Key, float | None]) -> dict[Key, float]:
    """The values that were measured."""
    return {key: value for key, value in values.items() if value is not None}


def or_missing(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and the lowest and highest where there are several."""
    if not values:
        return MISSING
    middle = format(statistics.fmean(values), form)
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"


def times_of(
    label: str,
    taken: Sequence[tuple[CellRecord, str]],
    *,
    places: Sequence[float] = (),
    each: float = 1e3,
    **looks: Any,
) -> Series:
    """Medians and p5–p95 of variants side by side, or at ``places``, times ``each``; what did not run is left out."""
    known = {
        place: record.summary(name)
        for place, (record, name) in zip(places or range(len(taken)), taken, strict=True)
        if name in record.samples
    }
    return Series(
        label=label,
        points=[(place, summary.median * each) for place, summary in known.items()],
        spans=[(summary.p5 * each, summary.p95 * each) for summary in known.values()],
        **{"colour": colour_of(label), **looks},
    )


def table_of(
    title: str, rows: Iterable[Mapping[str, object]], *, absent: Mapping[str, str] | None = None, note: str = ""
) -> Table:
    """A table of rows that have a value for every column; None where there is nothing to show.

    Rows of what is ``absent`` follow, with the reasons.
    """
    found = list(rows)
    columns = list(found[0]) if found else ["variant", "reason"]
    shown = [[MISSING if value is None else str(value) for value in row.values()] for row in found]
    shown += [[name, reason, *[MISSING] * (len(columns) - 2)] for name, reason in (absent or {}).items()]
    return Table(title=title, columns=columns, rows=shown, note=note)


def timing_table(
    record: CellRecord, *, baseline: str, note: str = "", more: Mapping[str, Callable[[str], object]] | None = None
) -> Table:
    """Every variant of a cell: its time and spread, its ratio to the baseline, its bytes, its distance to the limit.

    ``more`` are further columns, by their headings.
    """

    def row(variant: str) -> dict[str, object]:
        taken, limit = record.summary(variant), record.limit(variant)
        values = {
            "variant": variant,
            "median ms": f"{taken.median * 1e3:.1f}",
            "p5–p95 ms": f"{taken.p5 * 1e3:.1f}–{taken.p95 * 1e3:.1f}",
            "time / baseline": record.ratio(variant, baseline) if baseline in record.samples else None,
            **{title: words(variant) for title, words in (more or {}).items()},
            "sent MB": f"{record.sent(variant) / 1e6:.2f}",
        }
        limited = {"time / limit": None if limit is None else f"{taken.median / limit:.2f}"}
        return values | (limited if LIMITS in record.facts else {})

    title, words = f"{record.cell.name} ({record.rounds} rounds)", f"The baseline is {baseline}. {note}".rstrip()
    return table_of(title, map(row, record.samples), absent=record.absent, note=words)
