"""The DDP paper's other side of skipped synchronization: what it does to the loss.

This trains for real: a small network reads eight bytes of Python's
standard library and guesses the next. As in the paper, gradients add up over n iterations (under ``no_sync``, nothing
divides them), are averaged over the ranks, and the optimizer steps once, with the same learning rate for every n. Every
n starts from the same weights and reads the same bytes; other seeds have other weights and other bytes. A round is
eight iterations, so that every n has whole windows in it.

A round ends with the loss on text that no rank trains on; that evaluation is not in the times. A variant has one curve
per seed, not thirty repetitions: rounds are points of the curve. Times are medians over them.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.canvas import INK, colour
from gradsync.observe.charts.kinds import Series, draw_curves
from gradsync.tools.bench.measure import CellRounds, Parts, Step
from gradsync.tools.bench.peers import Gradsync
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.scenario import Picture, Scenario, Table, cell, known, picture, spread, table_of
from gradsync.tools.bench.workload import Pattern, window_step
from gradsync.tools.llm.text_sources import open_source

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SYMBOLS", "Convergence", "SplitText", "learning", "mean_curve"]

SYMBOLS = 128
TEXT_BYTES, HELD_OUT_SEED = 1_000_000, 1234
LOSS_LABEL = "loss on held-out text"


def read_symbols(count: int) -> Tensor:
    """The first bytes of Python's standard library, as symbols. Those above 127, which are rare, count as one."""
    data = bytearray()
    for document in open_source("stdlib"):
        data += document
        if len(data) >= count:
            return torch.frombuffer(data[:count], dtype=torch.uint8).long().clamp(max=SYMBOLS - 1)
    raise ConfigurationError(
        f"this needs {count:,} bytes of Python's standard library, but there are {len(data):,}. Install its source "
        "files"
    )


@dataclass(frozen=True, kw_only=True)
class SplitText:
    """Symbols to train on, and sequences of ``length`` symbols, and one more, to check with."""

    training: Tensor
    held_out: Tensor
    length: int

    @classmethod
    def read(cls, *, held_out: int, length: int) -> "SplitText":
        symbols = read_symbols(TEXT_BYTES)
        cut = TEXT_BYTES * 9 // 10
        checked = _sequences(symbols[cut:], held_out, length, torch.Generator().manual_seed(HELD_OUT_SEED))
        return cls(training=symbols[:cut], held_out=checked, length=length)

    def own(self, count: int, generator: torch.Generator) -> Tensor:
        """Everyone draws all sequences and takes its own, so that what is read depends on the seed alone."""
        return _sequences(self.training, count, self.length, generator)[dist.get_rank() :: dist.get_world_size()]


def _sequences(symbols: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(symbols) - length, (count, 1), generator=generator)
    return symbols[starts + torch.arange(length + 1)]


def learning(steps: Callable[[], object], loss: Callable[[], Tensor]) -> Step:
    """Several windows of training, the seconds they take, and the loss that they lead to on this rank."""

    def step() -> Parts:
        began = time.perf_counter()
        steps()
        seconds = time.perf_counter() - began
        with torch.no_grad():
            return {"training": seconds, "loss": float(loss())}

    return step


def mean_curve(label: str, places: Iterable[float], losses: Sequence[Sequence[float]], **looks: Any) -> Series:
    """The mean of all seeds at every place, and their range."""
    return Series(
        label=label,
        points=[(place, statistics.fmean(each)) for place, each in zip(places, losses, strict=True)],
        spans=[(min(each), max(each)) for each in losses if len(each) > 1],
        **looks,
    )


PERIODS = (1, 2, 4, 8)
ITERATIONS = max(PERIODS)
# Learning rates by samples an iteration, over all ranks. The paper has 0.02 and 0.06; this network bears more.
RATES = {8: 0.02, 256: 0.2}
COLOURS = {1: INK, 2: colour("sky"), 4: colour("green"), 8: colour("vermillion")}

CONTEXT, WIDTH = 8, 128
HELD_OUT_SAMPLES = 1024
# The last points of a curve, whose mean is its end.
LAST = 3
# A loss that ends higher by less than this share of it is called the same.
NEGLIGIBLE = 0.01


def variant_name(batch: int, period: int, seed: int) -> str:
    return f"batch {batch} · every {period} · seed {seed}"


class Convergence(Scenario):
    """Loss over iterations and over time, with gradients averaged every, every 2nd, 4th and 8th iteration."""

    name = "convergence"
    title = "Convergence: what skipped synchronization does to the loss"
    source = "After Li et al., PyTorch Distributed, VLDB 2020 (skipping harms at batch 256, not at batch 8)."
    question = "Does averaging only every n-th iteration reach the same loss, and how many seconds does it save?"

    def cells(self, *, quick: bool) -> list[Cell]:
        fixed: dict[str, Any] = {"quick": quick, "warmup": 0, "rounds": (40, 150), "emulated": False}
        return [
            cell("1 host, 2 ranks, loopback", each=0.65, options={"seeds": 2 if quick else 3}, **fixed),
            cell(each=0.55, hosts=2, rate="100mbit", options={"seeds": 1}, **fixed),
        ]

    def measure(self, rounds: CellRounds) -> None:
        text = SplitText.read(held_out=HELD_OUT_SAMPLES, length=CONTEXT)
        variants: dict[str, Step] = {}
        for batch in RATES:
            for period in PERIODS:
                for seed in range(rounds.cell.options["seeds"]):
                    variants[variant_name(batch, period, seed)] = _training(text, batch, period, seed)
        network = sum(parameter.numel() for parameter in _network(0).parameters())
        rounds.fact("gradient bytes", network * 4)
        rounds.fact("learning rates", {str(batch): rate for batch, rate in RATES.items()})
        rounds.run(variants)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        return [_table(Trained(record)) for record in records]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        times = [_time_picture(Trained(record), place) for place, record in enumerate(records)]
        return [_loss_picture(_most(records)), *times]

    def reading(self, records: Sequence[CellRecord]) -> str:
        return " ".join(filter(None, [_harm(_most(records)), *(_saving(Trained(record)) for record in records)]))


def _network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    features = 16
    return nn.Sequential(
        nn.Embedding(SYMBOLS, features),
        nn.Flatten(),
        nn.Linear(CONTEXT * features, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, SYMBOLS),
    )


def _training(text: SplitText, batch: int, period: int, seed: int) -> Step:
    """Eight iterations of one variant, and the loss they lead to."""
    generator = torch.Generator().manual_seed(seed)
    network = _network(seed)
    # Not told of the window: it would divide by its length.
    wrapped = Gradsync().wrap(network, partial(torch.optim.SGD, lr=RATES[batch]))

    def loss_of(model: nn.Module, sequences: Tensor) -> Tensor:
        return F.cross_entropy(model(sequences[:, :CONTEXT]), sequences[:, CONTEXT])

    def forward(model: nn.Module) -> Tensor:
        return loss_of(model, text.own(batch, generator))

    steps = window_step(wrapped, forward, count=period, pattern=Pattern.NO_SYNC, times=ITERATIONS // period)
    return learning(steps, lambda: loss_of(network, text.held_out))


class Trained:
    """A cell by batch and period: the losses of every seed, cut where the shortest ends, and the times."""

    def __init__(self, record: CellRecord) -> None:
        self.record = record
        self.name, self.iterations = record.cell.name, record.rounds * ITERATIONS
        self.seeds = sorted({int(name.rsplit(" ", 1)[1]) for name in record.samples})
        self.curves = {(batch, period): self._curves(batch, period) for batch in RATES for period in PERIODS}

    def _known(self, batch: int, period: int) -> list[str]:
        names = (variant_name(batch, period, seed) for seed in self.seeds)
        return [name for name in names if name in self.record.samples]

    def _curves(self, batch: int, period: int) -> list[list[float]]:
        taken = [self.record.samples[name] for name in self._known(batch, period)]
        shortest = min(map(len, taken), default=0)
        return [[samples[number].parts["loss"] for number in sorted(samples)[:shortest]] for samples in taken]

    def ends(self, batch: int, period: int) -> list[float]:
        return [statistics.fmean(curve[-LAST:]) for curve in self.curves[batch, period]]

    def worse(self, batch: int, period: int) -> list[float]:
        """How much the loss ends above that of n = 1, seed by seed."""
        both = zip(self.ends(batch, period), self.ends(batch, 1), strict=False)
        return [mine - baseline for mine, baseline in both]

    def iteration(self, batch: int, period: int) -> float | None:
        """Median seconds of an iteration."""
        rounds = [self.record.part(name, "training") for name in self._known(batch, period)]
        return statistics.median(rounds) / ITERATIONS if rounds else None

    def savings(self) -> dict[int, tuple[float, float]]:
        """What the whole run takes if every iteration averages, and what it saves if every last one does, by batch."""
        both = {batch: (self.iteration(batch, 1), self.iteration(batch, ITERATIONS)) for batch in RATES}
        return {
            batch: (first * self.iterations, (first - last) * self.iterations)
            for batch, (first, last) in both.items()
            if first is not None and last is not None
        }


def _most(records: Sequence[CellRecord]) -> Trained:
    """The cell with most seeds shows best what is noise."""
    return max(map(Trained, records), key=lambda cell: len(cell.seeds))


def _table(cell: Trained) -> Table:
    seeds = len(cell.seeds)
    taken = known({key: cell.iteration(*key) for key in cell.curves})

    def row(batch: int, period: int) -> dict[str, object]:
        each, alone = taken[batch, period], taken.get((batch, 1))
        return {
            "averaged": f"batch {batch}, {'every iteration' if period == 1 else f'every {period}'}",
            "loss at the end": spread(cell.ends(batch, period), ".3f"),
            "above n = 1": spread(cell.worse(batch, period), "+.3f") if period > 1 else None,
            "ms an iteration": f"{each * 1e3:.2f}",
            "seconds": f"{each * cell.iterations:.2f}",
            "seconds saved": None if alone is None else f"{(alone - each) * cell.iterations:.2f}",
        }

    return table_of(
        f"{cell.name}: {cell.iterations} iterations, real computation",
        [row(*key) for key in taken],
        note=(
            f"{seeds} seed{'s: the mean, lowest and highest' if seeds > 1 else ''}; one curve a seed, no repeated "
            f"rounds. The loss is that of held-out text, mean of the last {LAST} points. Times are medians over "
            "the rounds, without evaluation."
        ),
    )


def _loss_picture(cell: Trained) -> Picture:
    seeds, title = len(cell.seeds), "Loss over iterations"
    worse = {batch: cell.worse(batch, ITERATIONS) for batch in RATES}
    if all(worse.values()):
        changes = [f"by {statistics.fmean(values):+.2f} at batch {batch}" for batch, values in worse.items()]
        title = f"Averaging only every {ITERATIONS}th iteration changes the final loss {' and '.join(changes)}"
    band = f" Lines are means of {seeds} seeds, bands reach from the lowest to the highest." if seeds > 1 else ""
    return _picture("loss", title, cell, "iterations", dict.fromkeys(cell.curves, 1.0), _harm(cell) + band)


def _time_picture(cell: Trained, place: int) -> Picture:
    parts = [f"{saved:.1f} s at batch {batch}" for batch, (_, saved) in cell.savings().items()]
    saving = f"every {ITERATIONS}th saves {' and '.join(parts)}" if parts else "no comparison"
    title = f"Loss over time, {cell.name}: {saving}"
    lengths = {key: cell.iteration(*key) for key in cell.curves}
    shown = _picture(f"time-{place}", title, cell, "seconds of training", lengths, _saving(cell) or title)
    for panel in shown.figure.axes:
        panel.set_xlim(left=0)
    return shown


def _picture(
    slug: str, title: str, cell: Trained, xlabel: str, lengths: Mapping[tuple[int, int], float | None], reading: str
) -> Picture:
    """A panel a batch; an iteration of each batch and period is so long on the axis.

    Its range is that of the curves that every iteration averages: what leaves it at the top has diverged.
    """
    every = [loss for curves in cell.curves.values() for curve in curves for loss in curve]
    low, high = min(every), max([loss for batch in RATES for curve in cell.curves[batch, 1] for loss in curve] or every)
    margin = (high - low) * 0.06 or 0.1

    def draw(axes: "Axes", batch: int) -> None:
        each = known({period: lengths[batch, period] for period in PERIODS})
        draw_curves(axes, [_curve(cell, batch, period, length) for period, length in each.items()])
        axes.set_xlabel(xlabel)
        axes.set_ylim(low - margin, high + margin * 4)

    panels = [(f"batch {batch}, learning rate {rate}", partial(draw, batch=batch)) for batch, rate in RATES.items()]
    return picture(slug, title, panels, reading=reading, ylabel=LOSS_LABEL, height=4.4)


def _curve(cell: Trained, batch: int, period: int, each: float) -> Series:
    """An iteration is ``each`` long on the axis."""
    rounds = list(zip(*cell.curves[batch, period], strict=True))
    return mean_curve(
        "averaged every iteration" if period == 1 else f"every {period}",
        [(number + 1) * ITERATIONS * each for number in range(len(rounds))],
        rounds,
        colour=COLOURS[period],
        # Curves that lie on each other still show that there are several.
        width=1.5 + 3.0 * (len(PERIODS) - 1 - PERIODS.index(period)) / len(PERIODS),
    )


def _harm(cell: Trained) -> str:
    """Sentences on how much each n ends above n = 1, and which of them do so with every seed."""
    sentences = []
    for batch in RATES:
        worse = {period: values for period in PERIODS[1:] if (values := cell.worse(batch, period))}
        if not worse:
            continue
        shown = ", ".join(f"n = {period} {statistics.fmean(values):+.3f}" for period, values in worse.items())
        noise = NEGLIGIBLE * statistics.fmean(cell.ends(batch, 1))
        always = [f"n = {period}" for period, values in worse.items() if min(values) > noise]
        verdict = f"harmed with every seed: {', '.join(always)}" if always else "no harm"
        sentences.append(f"Batch {batch}, final loss against averaging every iteration: {shown} ({verdict}).")
    return " ".join(sentences) or "There is nothing to compare yet."


def _saving(cell: Trained) -> str:
    parts = [
        f"{saved:.1f} s of {whole:.1f} s at batch {batch} ({saved / whole * 100:.0f} %)"
        for batch, (whole, saved) in cell.savings().items()
    ]
    saves = f"{cell.name}: skipping 7 of {ITERATIONS} synchronizations saves {' and '.join(parts)}."
    return saves if parts else ""
