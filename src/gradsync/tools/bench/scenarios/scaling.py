"""Weak scaling: every rank is a separate host with the same work, and the number of ranks grows.

The efficiency is the time of one process without a wrapper over the time of N ranks. All ranks share the cores of one
machine, so the hosts' own work (Python, copies, sums, sockets) adds up, which it would not on real hosts. How much of
the cores that takes is measured and shown.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gradsync.observe.charts.kinds import Series, name_ends
from gradsync.tools.bench.measure import CellRounds
from gradsync.tools.bench.peers import ALONE, OURS, TUNED, Gradsync, NoWrapper
from gradsync.tools.bench.record import Cell, CellRecord, percent
from gradsync.tools.bench.scenario import (
    Picture,
    Scenario,
    Table,
    cell,
    colour_of,
    gpu_cell,
    known,
    link_words,
    paper_models,
    picture,
    table_of,
    times_of,
)
from gradsync.tools.bench.workload import PROCESSOR, Lineup, tuned_ddp, window_step, with_processor_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Scaling"]

NCCL = "NCCL"
RATES = ("200mbit", "1gbit")
SHOWN = (ALONE, TUNED, OURS)
MODEL = {"parameters": 160_000, "layers": 2, "seconds": 0.05}
# Of all gradients: the bucket sizes from which torch's DDP gets its best. Fewer than elsewhere, and after a shorter
# warm-up: every rank more costs time here.
SHARES = (1, 4)


class Scaling(Scenario):
    """Time of a step and efficiency over the number of ranks, at two link rates."""

    name = "scaling"
    title = "Scaling: what each further host costs"
    source = (
        "After the scalability figures of Li et al., PyTorch Distributed, VLDB 2020 (256 GPUs take about 2 times the "
        "local iteration with NCCL, 3 times with Gloo on ResNet-50 and 6 on BERT)."
    )
    question = "How much of the speed of N hosts is left when their gradients are averaged?"
    baseline = ALONE

    def cells(self, *, quick: bool) -> list[Cell]:
        counts = (2, 4, 8) if quick else (2, 4, 8, 16)
        fixed: dict[str, Any] = {"quick": quick, "rounds": (30, 60)}
        one = cell("1 rank", ranks=1, each=0.2, start=7.0, options={"link": "", **MODEL}, **fixed)
        return [one] + [
            cell(
                ranks=count,
                hosts=count,
                rate=rate,
                each=0.2 + 0.025 * count,
                start=3.0 + 0.55 * count,
                options={"link": link_words(rate), **MODEL},
                **fixed,
            )
            for rate in RATES
            for count in counts
        ]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        model, counts = paper_models(quick=quick)[0], (1, 2, 4) if quick else (1, 2, 4, 8)
        return [
            gpu_cell(
                f"{count} ranks, NCCL" if count > 1 else "1 rank",
                quick=quick,
                ranks=count,
                each=model["seconds"] * (3 + count / 2),
                options={"link": NCCL if count > 1 else "", **model},
            )
            for count in counts
        ]

    def measure(self, rounds: CellRounds) -> None:
        lineup = Lineup(rounds)
        rounds.fact("cores", len(os.sched_getaffinity(0)))
        forward = lineup.workload.forward
        for peer in (NoWrapper(), tuned_ddp(rounds, lineup.workload, shares=SHARES, warmup=2), Gradsync()):
            lineup.add(peer, step=lambda wrapped: with_processor_seconds(window_step(wrapped, forward)))
        lineup.settle().run()

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        def row(record: CellRecord, peer: str) -> dict[str, object]:
            share = _efficiency(record, records, peer)
            return {
                "ranks and link": record.cell.name,
                "variant": peer,
                "median ms": f"{record.ms(peer):.1f}",
                "efficiency": None if share is None else percent(share),
                "host work of a step": _host_share(record, peer),
            }

        return [
            table_of(
                "Weak scaling",
                [row(each, peer) for each in records for peer in SHOWN if peer in each.samples],
                note="Efficiency: one process without a wrapper over this. Host work: the share of all cores that the "
                "ranks together keep busy during a step. Real hosts would have cores of their own.",
            )
        ]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        def panels(form: str, room: float, series_of: Callable[[Sequence[CellRecord], str], Series]) -> list[Any]:
            def draw(axes: "Axes", words: str) -> None:
                shown = _of_link(records, words)
                ranks = [str(record.cell.ranks) for record in shown]
                name_ends(axes, ranks, [series_of(shown, peer) for peer in SHOWN], form=form, room=room)
                if form.endswith("%"):
                    axes.set_ylim(0, 108)
                axes.set_xlabel("ranks" if words == NCCL else "ranks, each on a host of its own")

            links = _links(records) or list(map(link_words, RATES))
            return [(_with_sharing(words, records), partial(draw, words=words)) for words in links]

        title, reading = _message(records), self.reading(records)
        shares = panels("{:.0f} %", 1.5, lambda shown, peer: _shares(shown, records, peer))
        times, words = panels("{:.0f} ms", 1.6, _times), _host_words(records)
        time_title, time_label = "Time of a step over the number of ranks", "ms a step (median, p5–p95)"
        return [
            picture("efficiency", title, shares, reading=reading, ylabel="efficiency, %", columns=0),
            picture("time", time_title, times, reading=words, ylabel=time_label, columns=0),
        ]

    def reading(self, records: Sequence[CellRecord]) -> str:
        sentences = []
        for words in _links(records):
            shown = [record for record in _of_link(records, words) if record.cell.ranks > 1]
            for last in shown[-1:]:
                shares = known({peer: _efficiency(last, records, peer) for peer in (TUNED, OURS)})
                parts = [f"{peer} {percent(value)}" for peer, value in shares.items()]
                sentences.append(f"{last.cell.name}: {', '.join(parts)} of the speed of as many single processes.")
        return " ".join([*sentences, _host_words(records)])


def _links(records: Sequence[CellRecord]) -> list[str]:
    """The links between several ranks."""
    return list(dict.fromkeys(link for record in records if (link := record.cell.options["link"])))


def _with_sharing(link: str, records: Sequence[CellRecord]) -> str:
    """The link, and how its ranks have their GPUs, if they have any: most of them."""
    *_, last = [record.cell for record in _of_link(records, link)] or [Cell(name="")]
    return f"{link}, {last.sharing}" if link and last.sharing else link


def _of_link(records: Sequence[CellRecord], words: str) -> list[CellRecord]:
    """The cells of a link by ranks, with the one rank that needs none in front."""
    cells = [record for record in records if record.cell.options["link"] in ("", words)]
    return sorted(cells, key=lambda record: record.cell.ranks)


def _efficiency(record: CellRecord, records: Sequence[CellRecord], peer: str) -> float | None:
    single = next((other for other in records if other.cell.ranks == 1 and ALONE in other.samples), None)
    return None if single is None or peer not in record.samples else single.ms(ALONE) / record.ms(peer)


def _shares(shown: Sequence[CellRecord], records: Sequence[CellRecord], peer: str) -> Series:
    values = known({place: _efficiency(record, records, peer) for place, record in enumerate(shown)})
    points = [(float(place), value * 100) for place, value in values.items()]
    return Series(label=peer, points=points, colour=colour_of(peer), style="dashed" if peer == ALONE else "line")


def _times(shown: Sequence[CellRecord], peer: str) -> Series:
    return times_of(peer, [(record, peer) for record in shown], style="dashed" if peer == ALONE else "line")


def _host_share(record: CellRecord, peer: str) -> str:
    """The share of processor time that all ranks take of what the cores have during a step."""
    cores = int(record.facts.get("cores", 1))
    return percent(record.part(peer, PROCESSOR) * record.cell.ranks / (cores * record.summary(peer).median))


def _host_words(records: Sequence[CellRecord]) -> str:
    largest = max(records, key=lambda record: record.cell.ranks)
    shares = [f"{_host_share(largest, peer)} ({peer})" for peer in (TUNED, OURS) if peer in largest.samples]
    many = f"with {largest.cell.ranks} ranks on one machine, the work of the hosts themselves"
    return f"Emulated compute: {many} keeps {', '.join(shares)} of its cores busy during a step." if shares else ""


def _message(records: Sequence[CellRecord]) -> str:
    largest = max((record.cell.ranks for record in records if record.cell.ranks > 1), default=0)
    most = [record for record in records if record.cell.ranks == largest]
    shares = known({record.cell.options["link"]: _efficiency(record, records, OURS) for record in most})
    parts = [f"{percent(value)} {'over' if link == NCCL else 'at'} {link}" for link, value in shares.items()]
    return f"{largest} ranks with gradsync: efficiency {' and '.join(parts)}" if parts else "Efficiency over ranks"
