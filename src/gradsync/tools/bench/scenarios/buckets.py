"""The DDP paper's buckets: larger and smaller ones, what ``"auto"`` chooses, and turns on several process groups.

``bucket-size``: gradients and computation are scaled to each link, so that communication takes about as long as the
computation. Sizes are fractions of all gradients, because a good size grows with the link; over NCCL they are those of
the paper. gradsync's own choice is measured after its tuner has finished.

``round-robin``: a group reduces its buckets one after another. Several groups keep more buckets in flight at a time,
which helps where one bucket leaves the link idle (many small ones), and cannot help where it is full (few large ones).
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from gradsync.communicator.round_robin import RoundRobinCommunicator
from gradsync.core.bucket.sizes import TUNED_AFTER
from gradsync.observe.charts.canvas import colour, limit_line
from gradsync.observe.charts.kinds import draw_bars, draw_curves
from gradsync.tools.bench.measure import CellRounds
from gradsync.tools.bench.peers import ALONE, DDP, OURS, TUNED, Gradsync, NoWrapper
from gradsync.tools.bench.record import Cell, CellRecord, percent
from gradsync.tools.bench.scenario import (
    Picture,
    Scenario,
    Table,
    cell,
    colour_of,
    known,
    paper_cells,
    picture,
    table_of,
    times_of,
)
from gradsync.tools.bench.workload import FLOAT_BYTES, MIB, Lineup, workload_of
from gradsync.tools.lab.lab import Rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BucketSize", "RoundRobin"]

RATES = ("200mbit", "400mbit", "1gbit")
AUTO = "gradsync auto"
AGAINST = {OURS: "auto / best fixed", TUNED: "auto / DDP tuned at best"}
SHARES, MORE_SHARES = (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8, 16, 32)
SENDING_SECONDS = 0.035
LAYERS = 6
# Of the paper, in MiB, as far as the models reach.
GPU_SIZES = {"ResNet-50": [5, 10, 25, 50], "BERT-base": [10, 25, 50, 100]}
MORE_GPU_SIZES = {"ResNet-50": [1, 2, 5, 10, 25, 50, 100], "BERT-base": [5, 10, 25, 50, 100, 200, 420]}


def size_name(peer: str, mebibytes: float) -> str:
    return f"{peer} · {mebibytes:.3f} MiB"


class BucketSize(Scenario):
    """Fixed sizes of gradsync and of DDP, and gradsync's own choice, at three link rates."""

    name = "bucket-size"
    title = "Bucket size: the best one, and the one that gradsync finds by itself"
    source = (
        "After Li et al., PyTorch Distributed, VLDB 2020 (buckets of 0 to 200 MB; best: about 5 MB over Gloo; over "
        "NCCL 10 to 25 MB for ResNet-50, about 50 MB for BERT)."
    )
    question = "How large should buckets be on this link, and is the automatic choice good enough?"
    baseline = AUTO
    slug, ylabel, height, shared = "sizes", "ms a step (median, p5–p95)", 4.4, False

    def cells(self, *, quick: bool) -> list[Cell]:
        shares = SHARES if quick else MORE_SHARES
        each = (2 * len(shares) + 2) * SENDING_SECONDS * 1.4
        return [
            cell(
                quick=quick,
                each=each,
                start=4.0,
                hosts=2,
                rate=rate,
                options={
                    "parameters": int(Rate.parse(rate).bytes_per_second * SENDING_SECONDS / FLOAT_BYTES),
                    "seconds": SENDING_SECONDS,
                    "shares": list(shares),
                },
            )
            for rate in RATES
        ]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        sizes = GPU_SIZES if quick else MORE_GPU_SIZES
        variants = 2 * len(sizes["BERT-base"]) + 2
        return paper_cells(quick=quick, steps=variants * 1.2, more={model: {"sizes": sizes[model]} for model in sizes})

    def measure(self, rounds: CellRounds) -> None:
        lineup, options = Lineup(rounds, workload_of(rounds, layers=LAYERS)), rounds.cell.options
        # Fixed sizes have a little room for the alignment and the tail of a bucket.
        shares = [lineup.workload.nbytes * 1.02 / share / MIB for share in options.get("shares", [])]
        sizes: list[float] = options.get("sizes", shares)
        rounds.fact("sizes in MiB", sizes)
        for peer in (NoWrapper(), Gradsync(name=AUTO)):
            lineup.add(peer)
        for size in sizes:
            lineup.add(Gradsync(bucket_mb=size), size_name(OURS, size))
            lineup.add(DDP(name=TUNED, tuned=True, bucket_mb=size), size_name(TUNED, size))
        auto = lineup.model(AUTO)
        before = auto.synchronizer.caps
        lineup.settle()
        for name, chosen in (("auto before tuning", before), ("auto", auto.synchronizer.caps)):
            rounds.fact(name, {"caps": list(chosen.caps), "from the end": chosen.from_the_end})
        rounds.fact("transport of gradsync", str(auto.transport))
        lineup.run()

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        looks = f"The tuner looks after {', '.join(map(str, TUNED_AFTER))} windows; all of them were run before."
        note = f"Buckets of auto are smaller towards the end where three sizes are given. {looks}"
        return [table_of("Where the automatic choice landed", map(_landing, records), note=note)]

    def message(self, records: Sequence[CellRecord]) -> str:
        ratios = known({record.cell.name: _over_best(record, OURS) for record in records})
        if not ratios:
            return "Time of a step over the size of buckets"
        worst = max(ratios.values())
        words = "no slower than" if worst <= 1.005 else f"within {(worst - 1) * 100:.0f} % of"
        return f"The automatic bucket size is {words} the best fixed one everywhere"

    def sentence(self, record: CellRecord) -> str:
        best, theirs = _over_best(record, OURS), _over_best(record, TUNED)
        if best is None or theirs is None:
            return f"{record.cell.name}: not everything was measured."
        return (
            f"{record.cell.name}: gradsync's best fixed size was {_best(record, OURS):.2f} MiB; its own choice took "
            f"{best:.2f} times as long as that, and {theirs:.2f} times as long as DDP tuned with its best size."
        )

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        for peer in (TUNED, OURS):
            sizes = _sizes(record, peer)
            taken = [(record, size_name(peer, size)) for size in sizes]
            fixed = times_of(f"{peer}, fixed size", taken, places=sizes, colour=colour_of(peer))
            draw_curves(axes, [fixed], marker="o", markersize=4.5)
        _mark_best(axes, record)
        _mark_auto(axes, record)
        limit = record.limit(AUTO)
        if limit is not None:
            limit_line(axes, limit * 1e3, label="limit")
        sizes = record.facts.get("sizes in MiB", [1.0])
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xticks(sizes, [_short(size) for size in sizes], fontsize=8.5)
        whole = "" if "sizes" in record.cell.options else " (the last: all in one)"
        axes.set_xlabel(f"bucket size, MiB{whole}")
        axes.set_ylim(0)


def _sizes(record: CellRecord, peer: str) -> list[float]:
    tried: list[float] = record.facts.get("sizes in MiB", [])
    return sorted(size for size in tried if size_name(peer, size) in record.samples)


def _best(record: CellRecord, peer: str) -> float:
    """The fixed size with the lowest median; 0 where none was measured."""
    return min(_sizes(record, peer), key=lambda size: record.ms(size_name(peer, size)), default=0.0)


def _over_best(record: CellRecord, peer: str) -> float | None:
    return record.times(AUTO, size_name(peer, _best(record, peer)))


def _landing(record: CellRecord) -> dict[str, object]:
    best, caps = _best(record, OURS), record.facts.get("auto", {}).get("caps", [])
    fixed = {title: size_name(peer, _best(record, peer)) for peer, title in AGAINST.items()}
    return {
        "link": record.cell.name,
        "best fixed size": f"{best:.2f} MiB" if best else None,
        "auto: largest bucket": f"{' / '.join(f'{cap / MIB:.2f}' for cap in caps)} MiB" if caps else None,
        **{title: record.times(AUTO, name) and record.ratio(AUTO, name) for title, name in fixed.items()},
    }


def _mark_best(axes: "Axes", record: CellRecord) -> None:
    best, words = _best(record, OURS), []
    if best:
        height, blue = record.ms(size_name(OURS, best)), colour_of(OURS)
        axes.plot(best, height, "o", color=colour("card"), markeredgecolor=blue, markersize=10, zorder=2.5)
        axes.plot(best, height, "o", color=blue, markersize=4.5, zorder=3)
        words.append(f"best fixed, {_short(best)} MiB: {height:.1f} ms")
    if AUTO in record.samples:
        words.append(f"auto: {record.ms(AUTO):.1f} ms")
    # Below the curves, where nothing else is.
    axes.text(0.03, 0.04, "\n".join(words), transform=axes.transAxes, fontsize=9, va="bottom")


def _mark_auto(axes: "Axes", record: CellRecord) -> None:
    if AUTO not in record.samples:
        return
    height = record.ms(AUTO)
    axes.axhline(height, color=colour_of(OURS), linewidth=1, linestyle=":", zorder=1)
    largest = max(record.facts.get("auto", {}).get("caps", []), default=0) / MIB
    if largest:
        place = min(largest, max(record.facts["sizes in MiB"]))
        axes.plot([place], [height], "D", color=colour_of(OURS), markersize=8, label="gradsync, auto", zorder=4)


def _short(size: float) -> str:
    return f"{size:.2f}" if size < 1 else f"{size:.1f}"


# -- several groups ---------------------------------------------------------------------------------------------------

OWN = "gradsync, its own transport"
# Where only latency counts, times are those of threads that are woken, and need many rounds; so the steps are short.
MODELS = {
    "many small buckets": {"parameters": 250_000, "layers": 8, "seconds": 0.018, "buckets": 25, "times": 3},
    "few large buckets": {"parameters": 500_000, "layers": 6, "seconds": 0.04, "buckets": 4, "times": 1},
}
MODEL_RATES = {"many small buckets": None, "few large buckets": "400mbit"}
GPU_BUCKETS = {"ResNet-50": {"buckets": 4}, "BERT-base": {"buckets": 8}}
# How many groups, in blues from light to dark: they are all gradsync.
SHADES = {1: "light-blue", 3: "mid-blue", 5: "blue"}


def groups_name(groups: int) -> str:
    return f"{groups} group{'s' if groups > 1 else ''}"


class RoundRobin(Scenario):
    """One, three and five groups, where latency counts and where bandwidth counts."""

    name = "round-robin"
    title = "Round-robin groups: when several process groups are better than one"
    source = (
        "After Li et al., PyTorch Distributed, VLDB 2020 (three groups: 33 % less for BERT over NCCL, else nothing)."
    )
    question = "Is a step faster if buckets take turns on several process groups?"
    baseline = groups_name(1)

    def cells(self, *, quick: bool) -> list[Cell]:
        cells = []
        for model, rate in MODEL_RATES.items():
            options = {"model": model, **MODELS[model]}
            times = int(MODELS[model]["times"])
            rounds = 30 * times, 100 * times
            each = 0.35 / times
            cells.append(
                cell(model, quick=quick, each=each, start=3.0, rounds=rounds, hosts=2, rate=rate, options=options)
            )
        return cells

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        return paper_cells(quick=quick, steps=7, more=GPU_BUCKETS)

    def measure(self, rounds: CellRounds) -> None:
        lineup, everybody = Lineup(rounds), dist.group.WORLD
        assert everybody is not None
        size = lineup.workload.nbytes / rounds.cell.options["buckets"] / MIB
        rounds.fact("bucket MiB", size)
        lineup.add(NoWrapper())
        for groups in SHADES:
            turns = partial(RoundRobinCommunicator.over, everybody, groups)
            lineup.add(Gradsync(name=groups_name(groups), bucket_mb=size, communicator=turns))
        lineup.add(Gradsync(name=OWN, bucket_mb=size))
        lineup.run()

    def note(self, record: CellRecord) -> str:
        size = record.facts.get("bucket MiB")
        same = f"all but {ALONE} are gradsync, with the same buckets."
        return "" if size is None else f"{record.cell.transport}, buckets of {size:.2f} MiB; {same}"

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        shades = {groups_name(count): colour(shade) for count, shade in SHADES.items()} | {OWN: colour("green")}
        ylabel = "ms a step (median, p5–p95)"

        def draw(axes: "Axes") -> None:
            bars = [times_of(name, [(each, name) for each in records], colour=shade) for name, shade in shades.items()]
            cells = [record.cell.name for record in records]
            draw_bars(axes, cells, bars, form="{:.0f}")
            axes.set_xticks(range(len(cells)), cells, fontsize=10)

        reading = self.reading(records)
        return [picture("groups", self.message(records), [("", draw)], reading=reading, ylabel=ylabel, height=4.0)]

    def message(self, records: Sequence[CellRecord]) -> str:
        three = known({each.cell.options["model"]: each.times(groups_name(3), groups_name(1)) for each in records})
        gains = [f"{_change(times)} with {model}" for model, times in three.items()]
        return f"Three groups in turn: a step takes {', '.join(gains)}" if gains else "Several groups in turn"

    def sentence(self, record: CellRecord) -> str:
        one = groups_name(1)
        several = known({count: record.times(groups_name(count), one) for count in SHADES if count > 1})
        gains = [f"{_change(times)} with {count} groups" for count, times in several.items()]
        alone = record.times(OWN, one)
        own = "" if alone is None else f"; {_change(alone)} with the transport that gradsync chooses"
        return f"{record.cell.name}, against one group, a step takes {', '.join(gains)}{own}."


def _change(times: float) -> str:
    if abs(1 - times) < 0.005:
        return "as long"
    return f"{percent(abs(1 - times))} {'less' if times < 1 else 'more'}"
