"""What happens to a training when a fault hits one rank: which rank notices, after how long, and how much is lost."""

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.canvas import SOFT
from gradsync.tools.bench.fault_outcomes import FaultOutcome, Limits
from gradsync.tools.bench.fault_program import (
    AFTERWARDS,
    CASES,
    CHECKPOINT_EVERY,
    CUT_LINK,
    ELASTIC,
    FINGERPRINTS_EVERY,
    MONITORED,
    RANKS,
    TORCHFT,
)
from gradsync.tools.bench.fault_trials import AGAINST_FAULTS, RESTARTS, SETUPS, Trial, outcomes
from gradsync.tools.bench.measure import Progress
from gradsync.tools.bench.peers import TUNED
from gradsync.tools.bench.record import Cell, CellRecord, RowFile, Sample
from gradsync.tools.bench.scenario import MISSING, Picture, Scenario, Table, colour_of, picture
from gradsync.tools.lab.gpu import SharedGpu
from gradsync.tools.lab.lab import Lab

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Faults"]

SEEDS = 20
QUICK = ("kill -9", "exception", "NaN", "bit flip")
# About what a trial takes on two cores: three processes that import torch, twice.
TRIAL_SECONDS = 30.0
PEERS = tuple(SETUPS)
# Of the axis: what is less is no time.
SHORTEST = 0.01
LIMITS = Limits()


class Faults(Scenario):
    """One cell per case, one round per seed, one variant per setup compared."""

    name, title = "faults", "Faults: who notices, and how it goes on"
    source = "own; moments drawn at random, real processes"
    question = "When a rank is killed, stopped, cut off or wrong: who says so, when, and what is lost?"
    slug = "notice"
    in_trials = True

    def cells(self, *, quick: bool) -> list[Cell]:
        seeds = 1 if quick else SEEDS
        return [
            Cell(
                name=name,
                ranks=RANKS,
                hosts=RANKS if name == CUT_LINK else None,
                warmup=0,
                rounds=seeds,
                seconds=seeds * len(PEERS) * TRIAL_SECONDS,
                emulated=False,
            )
            for name in (QUICK if quick else CASES)
        ]

    def drive(self, cell: Cell, place: Lab | SharedGpu | None, rows: RowFile, progress: Progress) -> None:
        lab = place if isinstance(place, Lab) else None
        wanted = cell.options.get("peers", list(PEERS))
        unknown = [name for name in wanted if name not in PEERS]
        if unknown:
            raise ConfigurationError(f"--peers: faults knows no peer {unknown[0]!r}. It knows: {', '.join(PEERS)}")
        reasons = {name: SETUPS[name].absent(cell.name) for name in wanted}
        for peer, reason in reasons.items():
            if reason is not None:
                rows.write("absent", variant=peer, reason=reason)
        peers = [name for name in wanted if reasons[name] is None]
        rows.fact("case", CASES[cell.name])
        known = rows.known(cell).samples
        planned = [
            Trial(peer=peer, seed=seed, case=cell.name, limits=LIMITS, lab=lab)
            for seed in range(cell.rounds)
            for peer in peers
            if seed not in known.get(peer, {})
        ]
        jobs = 1 if lab is not None else int(cell.options.get("jobs", 1))
        deadline = time.monotonic() + float(cell.options.get("seconds", float("inf")))
        before = cell.rounds * len(peers) - len(planned)
        for number, (trial, outcome) in enumerate(outcomes(planned, jobs, deadline), before + 1):
            if outcome is None:
                rows.fact(f"no fault with {trial.peer}, seed {trial.seed}", "its ranks did not get that far")
            else:
                _write(rows, trial.peer, trial.seed, outcome)
            progress(number, cell.rounds * len(peers))

    # -- what came of it ----------------------------------------------------------------------------------------------

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        columns = ["noticed after s", "most", "rank named", "steps lost", "goes on after s", "left behind"]
        rows = []
        for record in records:
            rows += [
                [peer, record.cell.name, str(len(record.samples[peer])), *_row(record, peer)]
                for peer in PEERS
                if peer in record.samples
            ]
            rows += [[peer, record.cell.name, reason, *[MISSING] * 6] for peer, reason in record.absent.items()]
        return [Table(title=self.title, columns=["peer", "case", "seeds", *columns], rows=rows, note=_note())]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        title, parts = self.reading(records), {"until somebody says so": "noticed", "until all ranks go on": "went on"}
        panels = [(words, partial(_draw, records=records, part=part)) for words, part in parts.items()]
        return [picture(self.slug, title, panels, reading=title, height=1.6 + 0.62 * len(records))]

    def reading(self, records: Sequence[CellRecord]) -> str:
        """A sentence on the trials in which the rank was named, and all ranks went on with the right parameters."""
        named, went_on = [], []
        for peer in PEERS:
            samples = [sample for record in records for sample in _samples(record, peer)]
            started = [each for record in records if record.cell.name != CUT_LINK for each in _samples(record, peer)]
            if samples:
                named.append(f"{peer} {sum(sample.parts['named'] > 0 for sample in samples)} of {len(samples)}")
            if started:
                went_on.append(f"{peer} {len(_known(started, 'went on'))} of {len(started)}")
        parts = [("The rank is named", named), ("training goes on, and right", went_on)]
        return "; ".join(f"{what}: {', '.join(each)}" for what, each in parts if each) + "."


def _write(rows: RowFile, peer: str, seed: int, outcome: FaultOutcome) -> None:
    parts: dict[str, float] = {"named": float(outcome.named), "left": float(len(outcome.left))}
    known = {"noticed": outcome.noticed, "lost": outcome.lost, "went on": outcome.went_on}
    parts |= {name: float(value) for name, value in known.items() if value is not None}
    seconds = LIMITS.notice if outcome.noticed is None else outcome.noticed
    rows.write("sample", variant=peer, round=seed, seconds=seconds, ranks=[], sent=0, parts=parts)
    if outcome.left:
        rows.fact(f"left behind by {peer}, seed {seed}", list(outcome.left))


def _row(record: CellRecord, peer: str) -> list[str]:
    samples = _samples(record, peer)
    noticed, lost, went_on = (_known(samples, name) for name in ("noticed", "lost", "went on"))
    count, is_cut = len(samples), record.cell.name == CUT_LINK
    left = sum(sample.parts["left"] > 0 for sample in samples)
    return [
        _median(noticed, count) if noticed else f"not within {LIMITS.notice:g} s",
        _seconds(max(noticed)) if len(noticed) == count else f"{count - len(noticed)} not noticed",
        f"{sum(sample.parts['named'] > 0 for sample in samples)} of {count}",
        MISSING if is_cut else "all since" if not lost else f"{statistics.median(lost):g}" + _but(lost, count),
        "no restart here" if is_cut else _median(went_on, count) if went_on else "never",
        f"{left} of {count}" if left else "nothing",
    ]


def _samples(record: CellRecord, peer: str) -> list[Sample]:
    return list(record.samples.get(peer, {}).values())


def _known(samples: Sequence[Sample], name: str) -> list[float]:
    return [sample.parts[name] for sample in samples if name in sample.parts]


def _median(values: Sequence[float], count: int) -> str:
    return _seconds(statistics.median(values)) + _but(values, count)


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


def _but(values: Sequence[float], count: int) -> str:
    return "" if len(values) == count else f" ({count - len(values)} never)"


def _note() -> str:
    return (
        f"{RANKS} ranks; medians over seeds, which draw the rank, the step and the moment in it. Groups of all have "
        f"{LIMITS.timeout:g} s for a collective. gradsync runs under the launcher of gradsync train, with "
        f"on_bad_step='skip' and fingerprints every {FINGERPRINTS_EVERY} steps; the others under torchrun, "
        f"{TUNED} with {_listed(AGAINST_FAULTS)}, a monitored barrier of {MONITORED.seconds} s before every backward, "
        f"and an error for gradients that are not finite; {ELASTIC} under the launcher of gradsync train --elastic, "
        f"{TORCHFT} with its own wrapper, the same lighthouse, and a torchrun for each rank. These two go on "
        "when the ranks that were not hurt do; "
        f"{RESTARTS} restarts each, from a checkpoint every {CHECKPOINT_EVERY} steps. Noticed: by the first rank that "
        "warns or raises, other than the one that was hurt, or else by the launcher's restart. Steps are lost where "
        "their work is done again, the one under way included, or skipped; all since the fault, where the parameters "
        f"are wrong in the end, or nobody goes on within {LIMITS.notice + LIMITS.going_on:g} s. Wrong numbers have "
        f"{AFTERWARDS} steps to be noticed in. "
        "The ranks with a link that is cut have no launcher, and are not started again. Left behind: processes, "
        "temporary files or shared memory, in so many trials."
    )


def _listed(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _draw(axes: "Axes", records: Sequence[CellRecord], part: str) -> None:
    """A dot a trial, a row a case; what did not come is a cross at the right end."""
    limit = LIMITS.notice if part == "noticed" else LIMITS.notice + LIMITS.going_on
    peers = [peer for peer in PEERS if any(_samples(record, peer) for record in records)]
    shift = 0.8 / max(len(peers), 1)
    for number, peer in enumerate(peers):
        dots: list[tuple[float, float]] = []
        crosses: list[tuple[float, float]] = []
        for place, record in enumerate(records):
            if part == "went on" and record.cell.name == CUT_LINK:
                continue
            height = place + (number - (len(peers) - 1) / 2) * shift
            for sample in _samples(record, peer):
                value = sample.parts.get(part)
                (crosses if value is None else dots).append((limit if value is None else max(value, SHORTEST), height))
        looks: dict[str, Any] = {"color": colour_of(peer), "linestyle": "none", "alpha": 0.75}
        axes.plot([x for x, _ in dots], [y for _, y in dots], marker="o", markersize=4.5, label=peer, **looks)
        axes.plot([x for x, _ in crosses], [y for _, y in crosses], marker="x", markersize=6, **looks)
    axes.set_xscale("log")
    axes.set_xlim(SHORTEST / 1.6, limit * 1.6)
    ticks = [tick for tick in (0.01, 0.1, 1.0, 10.0, limit) if tick <= limit]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(records)), [record.cell.name for record in records])
    axes.set_ylim(len(records) - 0.4, -0.6)
    for place in range(1, len(records)):
        axes.axhline(place - 0.5, color=SOFT, linewidth=0.5, alpha=0.5)
    axes.set_xlabel(f"seconds after the fault; a cross: not within {limit:g} s")
    axes.grid(True, axis="x")
