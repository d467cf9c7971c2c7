"""What communicating behind backward hides, and what communicating behind the next forward hides, too.

``overlap`` is the DDP paper's breakdown of an iteration. Naive sends every gradient separately after backward, bucketed
sends them in buckets after backward, gradsync and DDP send buckets during backward. Exposed communication is how much
longer backward takes than without a wrapper, in the same round; gradsync's Timeline measures it inside the engine, and
is shown next to it in the table.

``next-forward``: with forward F, backward B and communication W, a step that waits for the mean takes at least
``F + W`` where communication takes longer than backward. A step that waits only for the parameters it is about to use
takes ``max(F + B, W)``. A sample is several consecutive steps, because what one leaves in flight delays the next: one
step runs before the clock starts, and what the last one leaves is waited for after the clock has stopped.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradsync.core.engine.policy import Schedule
from gradsync.observe.charts.canvas import SOFT
from gradsync.observe.charts.kinds import draw_rows, draw_stacks
from gradsync.observe.timeline import Timeline
from gradsync.optim.sharded import ShardedOptimizer
from gradsync.parallel.clipping import clip_grad_norm_
from gradsync.tools.bench.measure import CellRounds, Steady
from gradsync.tools.bench.peers import (
    ALONE,
    DDP,
    FSDP2,
    OURS,
    OVERLAPPED,
    SHARDED,
    TUNED,
    ZERO,
    Gradsync,
    NoWrapper,
    WrappedModel,
)
from gradsync.tools.bench.record import Cell, CellRecord, percent, ring_bytes
from gradsync.tools.bench.scenario import (
    Scenario,
    Table,
    cell,
    colour_of,
    known,
    or_missing,
    paper_cells,
    table_of,
    timing_table,
)
from gradsync.tools.bench.workload import (
    FLOAT_BYTES,
    EmulatedWorkload,
    Lineup,
    Workload,
    timed_step,
    tuned_ddp,
)
from gradsync.tools.lab.lab import Rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["NextForward", "Overlap"]

# Of the parameters.
SCALES = {"ResNet-50": 0.03, "BERT-base": 0.007}
NAIVE, BUCKETED = "naive", "bucketed"
SHOWN = (NAIVE, BUCKETED, TUNED, OURS)
SCHEDULES: dict[str, Schedule] = {NAIVE: "naive", BUCKETED: "bucketed", OURS: "overlapped"}
PARTS = ("forward", "backward", "exposed", "optimizer")
LABELS = {part: "exposed communication" if part == "exposed" else part for part in PARTS}


class Overlap(Scenario):
    """Forward, backward, exposed communication and optimizer, with and without overlap."""

    name = "overlap"
    title = "Overlap: how much of the communication backward hides"
    source = (
        "After the latency breakdown of Li et al., PyTorch Distributed, VLDB 2020 (overlap saves, Gloo: 26.8 % of "
        "ResNet-50, 21.5 % of BERT; NCCL: 38.0 %, 35.2 %)."
    )
    question = "Where does the time of a step go, and how much of the communication can be hidden behind backward?"
    slug, height = "breakdown", 3.9

    def cells(self, *, quick: bool) -> list[Cell]:
        fixed: dict[str, Any] = {"quick": quick, "each": 0.9, "start": 5.0, "hosts": 2, "rate": "400mbit"}
        models = {name: {"model": name, "parameters": scale, "seconds": 0.065} for name, scale in SCALES.items()}
        return [cell(name, options=options, **fixed) for name, options in models.items()]

    def gpu_cells(self, *, quick: bool) -> list[Cell]:
        return paper_cells(quick=quick, steps=8)

    def measure(self, rounds: CellRounds) -> None:
        lineup = Lineup(rounds)
        timed = partial(timed_step, forward=lineup.workload.forward, device=rounds.device)
        for peer in (NoWrapper(), tuned_ddp(rounds, lineup.workload)):
            lineup.add(peer, step=timed)
        for name, schedule in SCHEDULES.items():
            timeline = Timeline(keep=1)
            ours = Gradsync(name=name, schedule=schedule, observer=timeline)
            lineup.add(ours, step=partial(timed, timeline=timeline))
        lineup.settle().run()

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        return [table for record in records for table in (_breakdown(record), timing_table(record, baseline=BUCKETED))]

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        shown = [name for name in SHOWN if name in record.samples] or list(record.samples)
        unit = BUCKETED if BUCKETED in record.samples else shown[0]
        whole = record.summary(unit).median
        parts = [_parts(record, name) for name in shown]
        stacks = {LABELS[part]: [max(each[part], 0.0) / whole for each in parts] for part in PARTS}
        draw_stacks(axes, shown, stacks, [f"{record.ms(name):.0f} ms" for name in shown])
        axes.set_xlabel(f"1 = a step of {unit}, without overlap")

    def message(self, records: Sequence[CellRecord]) -> str:
        """What overlap alone saves."""
        times = known({record.cell.options.get("model"): record.times(OURS, BUCKETED) for record in records})
        gains = [f"{percent(1 - share)} of a step of {model}" for model, share in times.items()]
        return f"Overlapping communication with backward saves {' and '.join(gains)}" if gains else "Parts of a step"

    def sentence(self, record: CellRecord) -> str:
        against = known({name: record.times(name, BUCKETED) for name in (NAIVE, TUNED, OURS)})
        parts = [f"{name} {times:.2f}" for name, times in against.items()]
        return f"{record.cell.name}, time of a step against buckets sent after backward: {', '.join(parts)}."


def _parts(record: CellRecord, variant: str) -> dict[str, float]:
    """Median seconds of the parts, where backward is what it takes alone and the rest is exposed communication."""
    alone = record.samples.get(ALONE, {})
    backward = {n: taken.parts["backward"] + taken.parts["exposed"] for n, taken in record.samples[variant].items()}
    exposed = [whole - alone[number].parts["backward"] for number, whole in backward.items() if number in alone]
    waited = statistics.median(exposed) if exposed else record.part(variant, "exposed")
    parts = {part: record.part(variant, part) for part in PARTS}
    return {**parts, "backward": statistics.median(backward.values()) - waited, "exposed": waited}


def _breakdown(record: CellRecord) -> Table:
    def row(variant: str) -> dict[str, object]:
        parts, seen = _parts(record, variant), f"{record.part(variant, 'exposed') * 1e3:.1f}"
        milliseconds = {part: f"{parts[part] * 1e3:.1f}" for part in PARTS}
        return {"variant": variant, **milliseconds, "exposed by Timeline": seen if variant in SCHEDULES else None}

    rows = [row(variant) for variant in (ALONE, *SHOWN) if variant in record.samples]
    return table_of(f"{record.cell.name}: parts of a step, median ms", rows)


# -- behind the next forward ------------------------------------------------------------------------------------------

CLIPPED, AUTO = ", clipped", f"{SHARDED}, auto"
# In seconds of forward and backward together.
COMPUTE, LAYERS, RATE = 0.06, 12, "400mbit"
BALANCED = "forward and backward"
# Communication against forward and backward: hidden by half of backward, as long as both, and far longer.
SHARES = {"half of backward": 1 / 3, BALANCED: 1.0, "four times as long": 4.0}
STEPS_A_SAMPLE = 10
MAX_NORM = 1.0
PLAIN_BOUND, BOUND = "bound F + W", "bound max(F + B, W)"


class NextForward(Scenario):
    """Time of a step with a plain and with a sharded optimizer, over what communication takes."""

    name = "next-forward"
    title = "Next forward: communication behind the whole step"
    source = "After the overlapped parameter gather of Megatron-LM's distributed optimizer, here under a plain loop."
    question = "How much faster is a step if new parameters travel behind the next forward?"
    baseline = TUNED
    slug, height, shared = "steps", 4.6, False

    def cells(self, *, quick: bool) -> list[Cell]:
        fixed: dict[str, Any] = {"quick": quick, "warmup": 2, "rounds": (6, 20)}
        balanced = {BALANCED: SHARES[BALANCED]}
        emulated = [
            cell(
                name=f"{hosts} hosts, wire {words}",
                each=6 * STEPS_A_SAMPLE * COMPUTE * max(1.0, share) * 1.3,
                ranks=hosts,
                hosts=hosts,
                rate=RATE,
                options={"share": share, "parameters": _parameters(share, hosts), "layers": LAYERS, "seconds": COMPUTE},
                **fixed,
            )
            for hosts, shares in ((2, balanced if quick else SHARES), (4, balanced))
            for words, share in shares.items()
        ]
        gpt = {"layers": 6, "width": 256, "batch": 2, "length": 128}
        transformers = [
            cell(name=f"GPT 5M, 2 hosts, {rate}", each=60.0, hosts=2, rate=rate, options=gpt, **fixed)
            for rate in ("400mbit", "200mbit")
        ]
        # Where ranks share memory, what counts is the work, also that of the optimizer, which is shared out.
        larger = {"layers": 8, "width": 512, "batch": 1, "length": 8, "optimizer": "AdamW"}
        one_host = cell("GPT 25M, 1 host, AdamW", each=15.0, emulated=False, options=larger, **fixed)
        # Steps of half a second and more, of ten variants: too long for a quick look.
        return [*emulated, one_host] if quick else [*emulated, *transformers, one_host]

    def measure(self, rounds: CellRounds) -> None:
        lineup = Lineup(rounds)
        workload, times = lineup.workload, STEPS_A_SAMPLE
        tuned = tuned_ddp(rounds, workload)
        sharded = Gradsync(name=SHARDED, gathers="next-forward")
        peers = [
            NoWrapper(),
            tuned,
            Gradsync(),
            sharded,
            Gradsync(name=AUTO, gathers="auto"),
            Gradsync(name=OVERLAPPED, late_means=True),
        ]
        if isinstance(workload, EmulatedWorkload):
            rounds.fact("forward seconds", workload.profile.forward_seconds)
        else:
            times //= 2
            peers += [DDP(name=ZERO, tuned=True, bucket_mb=tuned.bucket_mb, shares_state=True), FSDP2()]
        for peer in peers:
            lineup.add(peer, step=partial(_steady, workload, times))
        for peer, clip in ((tuned, torch.nn.utils.clip_grad_norm_), (sharded, clip_grad_norm_)):
            lineup.add(peer, peer.name + CLIPPED, step=partial(_steady, workload, times, clip=clip))
        lineup.settle()
        optimizer = lineup.variants[AUTO].wrapped.optimizer
        if isinstance(optimizer, ShardedOptimizer) and optimizer.choice is not None:
            rounds.fact("auto", optimizer.choice.report)
        lineup.run()

    def note(self, record: CellRecord) -> str:
        return f"Auto: {record.facts['auto']}." if "auto" in record.facts else ""

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        rows = {name: record.ms(name) for name in record.samples}
        bounds = {name: value * 1e3 for name, value in _bounds(record).items()}
        colours = {name: colour_of(name.removesuffix(CLIPPED)) for name in rows} | dict.fromkeys(bounds, SOFT)
        draw_rows(axes, {**rows, **bounds}, colours, form="{:.1f} ms", bold=SHARDED)
        axes.set_xlabel("ms a step (median)")

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        pairs = {
            "against DDP tuned": (TUNED, SHARDED),
            "against DDP tuned, both clipped": (TUNED + CLIPPED, SHARDED + CLIPPED),
            "against gradsync": (OURS, SHARDED),
            "auto, against gradsync": (OURS, AUTO),
        }
        rows = []
        for record in records:
            bound = _bounds(record).get(BOUND)
            apart = None if bound is None or SHARDED not in record.samples else record.ms(SHARDED) / 1e3 / bound
            gains = {title: or_missing(record.times(*pair), "{:.2f}× as fast") for title, pair in pairs.items()}
            rows.append({"cell": record.cell.name, **gains, "against the bound": or_missing(apart, "{:.2f}")})
        return [table_of("The sharded optimizer", rows)]

    def message(self, records: Sequence[CellRecord]) -> str:
        gains = known({record.cell.name: record.times(TUNED, SHARDED) for record in records})
        return f"Behind the next forward: up to {max(gains.values()):.2f}× tuned DDP" if gains else self.title

    def sentence(self, record: CellRecord) -> str:
        gain = record.times(TUNED, SHARDED)
        return "" if gain is None else f"{record.cell.name}: {gain:.2f} times as fast as tuned DDP."


def _parameters(share: float, hosts: int) -> int:
    """How many parameters make an all-reduce between the hosts take ``share`` of the computation."""
    return int(share * COMPUTE * Rate.parse(RATE).bytes_per_second / ring_bytes(FLOAT_BYTES, hosts))


def _bounds(record: CellRecord) -> dict[str, float]:
    """What a step takes at least, in seconds, if it waits for the mean; and if it does not."""
    forward = record.facts.get("forward seconds")
    if forward is None or record.limit(TUNED) is None:
        return {}
    seconds = record.cell.transfer_seconds(record.facts["gradient bytes"])
    compute = record.ms(ALONE) / 1e3
    return {PLAIN_BOUND: max(compute, forward + seconds), BOUND: max(compute, seconds)}


def _steady(
    workload: Workload,
    times: int,
    wrapped: WrappedModel,
    *,
    clip: Callable[[Iterable[Any], float], object] | None = None,
) -> Steady:
    def step() -> None:
        wrapped.backward(workload.forward(wrapped.model))
        if clip is not None:
            clip(wrapped.model.parameters(), MAX_NORM)
        wrapped.optimizer.step()
        wrapped.optimizer.zero_grad()

    return Steady(step=step, flush=wrapped.flush, times=times)
