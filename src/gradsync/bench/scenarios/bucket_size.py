"""The DDP paper's bucket sizes: how long a step takes with larger and smaller buckets, and where ``"auto"`` lands.

Gradients and computation are scaled to each link: the wire takes about as long as the computation. Sizes are shares of
all gradients, since a good size grows with the link. gradsync's own choice is measured after its tuner has finished.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradsync.bench.measure import Rounds, Step
from gradsync.bench.peers import DDP, Gradsync, NoWrapper
from gradsync.bench.record import EVERY, Cell, CellRecord
from gradsync.bench.scenario import ALONE, MISSING, OURS, TUNED, Picture, Table, colour_of, times_of, timing_table
from gradsync.bench.windows import Pattern, plain_step, window_step
from gradsync.bench.workload import FLOAT_BYTES, Workload
from gradsync.bucket.tuner import TUNED_AFTER
from gradsync.charts.canvas import canvas, colour, legend, limit_line
from gradsync.charts.kinds import draw_curves
from gradsync.data_parallel import DistributedDataParallel
from gradsync.lab.profile import transformer
from gradsync.lab.rate import Rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["BucketSize"]

MIB = 2**20
RATES = {"200mbit": "200 Mbit/s", "400mbit": "400 Mbit/s", "1gbit": "1 Gbit/s"}
AUTO = "gradsync auto"
AGAINST = {OURS: "auto / best fixed", TUNED: "auto / DDP tuned at best"}
SHARES, MORE_SHARES = (1, 2, 4, 8, 16), (1, 2, 3, 4, 6, 8, 16, 32)
WIRE_SECONDS = 0.035
LAYERS = 6
# Beyond the last meeting of the tuner, at which buckets are made anew.
TUNING_WINDOWS = max(TUNED_AFTER) + 4


def variant_name(peer: str, mebibytes: float) -> str:
    return f"{peer} · {mebibytes:.3f} MiB"


class BucketSize:
    """Fixed sizes of gradsync and of DDP, and gradsync's own choice, at three link rates."""

    name = "bucket-size"
    title = "Bucket size: the best one, and the one that gradsync finds by itself"
    source = "After Li et al., PyTorch Distributed, VLDB 2020 (ResNet-50 and BERT, buckets of 0 to 100 MB)."
    question = "How large should buckets be on this link, and is the automatic choice good enough?"

    def cells(self, *, quick: bool) -> list[Cell]:
        rounds = 30 if quick else 100
        shares = SHARES if quick else MORE_SHARES
        return [
            Cell(
                name=f"2 hosts, {words}",
                hosts=2,
                rate=rate,
                rounds=rounds,
                seconds=(rounds + 5) * (2 * len(shares) + 2) * WIRE_SECONDS * 1.4 + 4,
                options={
                    "parameters": int(Rate.parse(rate).bytes_per_second * WIRE_SECONDS / FLOAT_BYTES),
                    "seconds": WIRE_SECONDS,
                    "shares": list(shares),
                },
            )
            for rate, words in RATES.items()
        ]

    def measure(self, rounds: Rounds) -> None:
        options = rounds.cell.options
        profile = transformer(parameters=options["parameters"], layers=LAYERS, seconds=options["seconds"])
        workload = Workload(profile=profile)
        # Fixed sizes have a little room for the alignment and the tail of a bucket.
        sizes = [workload.nbytes * 1.02 / share / MIB for share in options["shares"]]
        rounds.fact("gradient bytes", workload.nbytes)
        rounds.fact("sizes in MiB", sizes)
        rounds.limits(compute=ALONE, wire={EVERY: workload.wire_seconds(rounds.cell)})
        auto = workload.wrap(Gradsync(name=AUTO))
        automatic = window_step(auto, workload.forward, count=1, pattern=Pattern.EVERY)
        variants: dict[str, Step] = {ALONE: plain_step(workload, NoWrapper()), AUTO: automatic}
        for size in sizes:
            variants[variant_name(OURS, size)] = plain_step(workload, Gradsync(bucket_mb=size))
            variants[variant_name(TUNED, size)] = plain_step(workload, DDP(name=TUNED, tuned=True, bucket_mb=size))
        wrapper = auto.model
        assert isinstance(wrapper, DistributedDataParallel)
        before = wrapper.synchronizer.caps
        for _ in range(TUNING_WINDOWS):
            automatic()
        after = wrapper.synchronizer.caps
        rounds.fact("auto before tuning", {"caps": list(before.caps), "from the end": before.from_the_end})
        rounds.fact("auto", {"caps": list(after.caps), "from the end": after.from_the_end})
        rounds.fact("wire of gradsync", str(wrapper.wire))
        rounds.run(variants)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        chosen = Table(
            title="Where the automatic choice landed",
            columns=["link", "best fixed size", "auto: largest bucket", *AGAINST.values()],
            rows=[_landing(record) for record in records],
            note="Buckets of auto are smaller towards the end where three sizes are given. " + _tuner_words(),
        )
        return [chosen, *(timing_table(record, baseline=AUTO) for record in records)]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        title = _message(records)
        figure, axes = canvas(title, panels=[record.cell.name for record in records], height=4.4, shared=False)
        for panel, record in zip(axes, records, strict=True):
            _draw(panel, record)
        axes[0].set_ylabel("ms a step (median, p5–p95)")
        legend(axes)
        return [Picture(slug="sizes", title=title, figure=figure, reading=self.reading(records))]

    def reading(self, records: Sequence[CellRecord]) -> str:
        return " ".join(_sentence(record) for record in records)


def _tuner_words() -> str:
    return f"The tuner looks after {', '.join(map(str, TUNED_AFTER))} windows; all of them were run before."


def _sizes(record: CellRecord, peer: str) -> list[float]:
    known: list[float] = record.facts.get("sizes in MiB", [])
    return sorted(size for size in known if variant_name(peer, size) in record.samples)


def _best(record: CellRecord, peer: str) -> float | None:
    """The fixed size with the lowest median."""
    return min(_sizes(record, peer), key=lambda size: record.summary(variant_name(peer, size)).median, default=None)


def _over_best(record: CellRecord, peer: str) -> float | None:
    best = _best(record, peer)
    return None if best is None else record.times(AUTO, variant_name(peer, best))


def _landing(record: CellRecord) -> list[str]:
    best, caps = _best(record, OURS), record.facts.get("auto", {}).get("caps", [])
    ratios = []
    for peer in AGAINST:
        fixed = _best(record, peer)
        known = fixed is not None and AUTO in record.samples
        ratios.append(str(record.ratio(AUTO, variant_name(peer, fixed))) if known and fixed is not None else MISSING)
    largest = " / ".join(f"{cap / MIB:.2f}" for cap in caps)
    size = MISSING if best is None else f"{best:.2f} MiB"
    return [record.cell.name, size, f"{largest} MiB" if caps else MISSING, *ratios]


def _draw(axes: "Axes", record: CellRecord) -> None:
    for peer in (TUNED, OURS):
        sizes = _sizes(record, peer)
        taken = [(record, variant_name(peer, size)) for size in sizes]
        fixed = times_of(f"{peer}, fixed size", taken, places=sizes, colour=colour_of(peer))
        draw_curves(axes, [fixed], marker="o", markersize=4.5)
    best = _best(record, OURS)
    if best is not None:
        height = record.summary(variant_name(OURS, best)).median * 1e3
        axes.plot(best, height, "o", color=colour("card"), markeredgecolor=colour_of(OURS), markersize=10, zorder=2.5)
        axes.plot(best, height, "o", color=colour_of(OURS), markersize=4.5, zorder=3)
    _draw_auto(axes, record)
    # Below the curves, where nothing else is.
    axes.text(0.03, 0.04, _values(record), transform=axes.transAxes, fontsize=9, va="bottom")
    limit = record.limit(AUTO)
    if limit is not None:
        limit_line(axes, limit * 1e3, label="limit")
    sizes = record.facts.get("sizes in MiB", [1.0])
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(sizes, [_short(size) for size in sizes], fontsize=8.5)
    axes.set_xlabel("bucket size, MiB (the last: all in one)")
    axes.set_ylim(0)


def _draw_auto(axes: "Axes", record: CellRecord) -> None:
    if AUTO not in record.samples:
        return
    height = record.summary(AUTO).median * 1e3
    axes.axhline(height, color=colour_of(OURS), linewidth=1, linestyle=":", zorder=1)
    largest = max(record.facts.get("auto", {}).get("caps", []), default=0) / MIB
    if largest:
        place = min(largest, max(record.facts["sizes in MiB"]))
        axes.plot([place], [height], "D", color=colour_of(OURS), markersize=8, label="gradsync, auto", zorder=4)


def _values(record: CellRecord) -> str:
    best = _best(record, OURS)
    known = {} if best is None else {f"best fixed, {_short(best)} MiB": variant_name(OURS, best)}
    known |= {"auto": AUTO} if AUTO in record.samples else {}
    return "\n".join(f"{name}: {record.summary(variant).median * 1e3:.1f} ms" for name, variant in known.items())


def _short(size: float) -> str:
    return f"{size:.2f}" if size < 1 else f"{size:.1f}"


def _message(records: Sequence[CellRecord]) -> str:
    ratios = [ratio for record in records if (ratio := _over_best(record, OURS)) is not None]
    if not ratios:
        return "Time of a step over the size of buckets"
    worst = max(ratios)
    words = "no slower than" if worst <= 1.005 else f"within {(worst - 1) * 100:.0f} % of"
    return f"The automatic bucket size is {words} the best fixed one on every link"


def _sentence(record: CellRecord) -> str:
    best, theirs = _over_best(record, OURS), _over_best(record, TUNED)
    if best is None or theirs is None:
        return f"{record.cell.name}: not everything was measured."
    size = _best(record, OURS)
    return (
        f"{record.cell.name}: gradsync's best fixed size was {size:.2f} MiB; its own choice took {best:.2f} times as "
        f"long as that, and {theirs:.2f} times as long as DDP tuned with its best size."
    )
