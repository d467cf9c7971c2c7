"""The gain from communicating behind the next forward, too.

With forward F, backward B and communication W, a step that waits for the mean takes at least ``F + W`` where
communication takes longer than backward. A step that waits only for the parameters it is about to use takes
``max(F + B, W)``. A sample is several consecutive steps, because what one leaves in flight delays the next: one step
runs before the clock starts, and what the last one leaves is waited for after the clock has stopped.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.core.bucket.sizes import TUNED_AFTER
from gradsync.observe.charts.canvas import SOFT
from gradsync.observe.charts.kinds import draw_rows
from gradsync.optim.sharded import ShardedOptimizer
from gradsync.optim.sharded.mode import DECIDED_AFTER
from gradsync.parallel.clipping import clip_grad_norm_
from gradsync.tools.bench.measure import Rounds, Steady
from gradsync.tools.bench.measured import MeasuredScenario
from gradsync.tools.bench.peers import (
    ALONE,
    FSDP2,
    OURS,
    OVERLAPPED,
    SHARDED,
    TUNED,
    Gradsync,
    GradsyncOverlapped,
    GradsyncSharded,
    NoWrapper,
    Peer,
    Wrapped,
    ZeroRedundancy,
)
from gradsync.tools.bench.record import Cell, CellRecord
from gradsync.tools.bench.scenario import Table, colour_of, known
from gradsync.tools.bench.windows import settle, tuned_ddp
from gradsync.tools.bench.workload import EmulatedWorkload, RealWorkload, Workload
from gradsync.tools.lab.lab import Rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["NextForward"]

CLIPPED, AUTO = ", clipped", f"{SHARDED}, auto"
# In seconds of forward and backward together.
COMPUTE, LAYERS, RATE = 0.06, 12, "400mbit"
BALANCED = "forward and backward"
# The wire against forward and backward: hidden by half of backward, as long as both, and far longer.
SHARES = {"half of backward": 1 / 3, BALANCED: 1.0, "four times as long": 4.0}
STEPS_A_SAMPLE = 10
MAX_NORM = 1.0
PLAIN_BOUND, BOUND = "bound F + W", "bound max(F + B, W)"


class NextForward(MeasuredScenario):
    """Time of a step with a plain and with a sharded optimizer, over what the wire takes."""

    name = "next-forward"
    title = "Next forward: the wire behind the whole step"
    source = "After the overlapped parameter gather of Megatron-LM's distributed optimizer, here under a plain loop."
    question = "How much faster is a step if new parameters travel behind the next forward?"
    baseline = TUNED
    slug, height, shared = "steps", 4.6, False

    def cells(self, *, quick: bool) -> list[Cell]:
        rounds = 6 if quick else 20
        balanced = {BALANCED: SHARES[BALANCED]}
        emulated = [
            Cell(
                name=f"{hosts} hosts, wire {words}",
                ranks=hosts,
                hosts=hosts,
                rate=RATE,
                warmup=2,
                rounds=rounds,
                seconds=(rounds + 12) * 6 * STEPS_A_SAMPLE * COMPUTE * max(1.0, share) * 1.3,
                emulated=True,
                options={"share": share, "parameters": _parameters(share, hosts), "layers": LAYERS, "seconds": COMPUTE},
            )
            for hosts, shares in ((2, balanced if quick else SHARES), (4, balanced))
            for words, share in shares.items()
        ]
        transformers = [
            Cell(
                name=f"GPT 5M, 2 hosts, {rate}",
                hosts=2,
                rate=rate,
                warmup=2,
                rounds=rounds,
                seconds=(rounds + 12) * 10 * 5 * 1.2,
                options={"layers": 6, "width": 256, "batch": 2, "length": 128},
            )
            for rate in ("400mbit", "200mbit")
        ]
        # Where the wire is memory, what counts is the work: of the optimizer, too, which is shared out.
        one_host = Cell(
            name="GPT 25M, 1 host, AdamW",
            warmup=2,
            rounds=rounds,
            seconds=(rounds + 12) * 10 * 5 * 0.3,
            emulated=False,
            options={"layers": 8, "width": 512, "batch": 1, "length": 8, "optimizer": "AdamW"},
        )
        # Steps of half a second and more, of ten variants: too long for a quick look.
        return [*emulated, one_host] if quick else [*emulated, *transformers, one_host]

    def measure(self, rounds: Rounds) -> None:
        options = rounds.cell.options
        workload: Workload = EmulatedWorkload.transformer(options) if "share" in options else RealWorkload(**options)
        workload.note(rounds)
        if isinstance(workload, EmulatedWorkload):
            rounds.fact("forward seconds", workload.profile.forward_seconds)
        tuned = tuned_ddp(rounds, workload)
        chosen = GradsyncSharded(name=AUTO, mode="auto")
        peers: list[Peer] = [NoWrapper(), tuned, Gradsync(), GradsyncSharded(), chosen, GradsyncOverlapped()]
        if isinstance(workload, RealWorkload):
            peers += [ZeroRedundancy(bucket_mb=tuned.bucket_mb), FSDP2()]
        times = STEPS_A_SAMPLE if isinstance(workload, EmulatedWorkload) else STEPS_A_SAMPLE // 2
        wrapped = {peer.name: workload.wrap(peer) for peer in peers}
        variants = {name: _steady(workload, each, times) for name, each in wrapped.items()}
        for peer, clip in ((tuned, torch.nn.utils.clip_grad_norm_), (GradsyncSharded(), clip_grad_norm_)):
            variants[peer.name + CLIPPED] = _steady(workload, workload.wrap(peer), times, clip=clip)
        for name in (OURS, SHARDED, AUTO, OVERLAPPED, SHARDED + CLIPPED):
            settle(variants[name].step, after=DECIDED_AFTER if name == AUTO else TUNED_AFTER[-1])
            variants[name].flush()
        optimizer = wrapped[AUTO].optimizer
        if isinstance(optimizer, ShardedOptimizer) and optimizer.choice is not None:
            rounds.fact("auto", optimizer.choice.report)
        rounds.run(variants)

    def note(self, record: CellRecord) -> str:
        return f"Auto: {record.facts['auto']}." if "auto" in record.facts else ""

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        rows = {name: record.ms(name) for name in record.samples}
        bounds = {name: value * 1e3 for name, value in _bounds(record).items()}
        colours = {name: colour_of(name.removesuffix(CLIPPED)) for name in rows} | dict.fromkeys(bounds, SOFT)
        draw_rows(axes, {**rows, **bounds}, colours, form="{:.1f} ms", bold=SHARDED)
        axes.set_xlabel("ms a step (median)")

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        columns = [
            "cell",
            "against DDP tuned",
            "against DDP tuned, both clipped",
            "against gradsync",
            "auto, against gradsync",
            "against the bound",
        ]
        rows = []
        for record in records:
            bound = _bounds(record).get(BOUND)
            pairs = [(SHARDED, TUNED), (SHARDED + CLIPPED, TUNED + CLIPPED), (SHARDED, OURS), (AUTO, OURS)]
            gains = [record.times(other, ours) for ours, other in pairs]
            apart = None if bound is None or SHARDED not in record.samples else record.ms(SHARDED) / 1e3 / bound
            rows.append([record.cell.name, *("–" if gain is None else f"{gain:.2f}× as fast" for gain in gains)])
            rows[-1].append("–" if apart is None else f"{apart:.2f}")
        return [Table(title="The sharded optimizer", columns=columns, rows=rows)]

    def message(self, records: Sequence[CellRecord]) -> str:
        gains = known({record.cell.name: record.times(TUNED, SHARDED) for record in records})
        return f"Behind the next forward: up to {max(gains.values()):.2f}× tuned DDP" if gains else self.title

    def sentence(self, record: CellRecord) -> str:
        gain = record.times(TUNED, SHARDED)
        return "" if gain is None else f"{record.cell.name}: {gain:.2f} times as fast as tuned DDP."


def _parameters(share: float, hosts: int) -> int:
    """So many that an all-reduce between the hosts takes ``share`` of the computation."""
    seconds = share * COMPUTE
    nbytes = seconds * Rate.parse(RATE).bytes_per_second / (2 * (hosts - 1) / hosts)
    return int(nbytes / 4)


def _bounds(record: CellRecord) -> dict[str, float]:
    """What a step takes at least, in seconds, if it waits for the mean; and if it does not."""
    forward, wire = record.facts.get("forward seconds"), record.limit(TUNED)
    if forward is None or ALONE not in record.samples or wire is None:
        return {}
    seconds = record.cell.wire_seconds(record.facts["gradient bytes"])
    compute = record.ms(ALONE) / 1e3
    return {PLAIN_BOUND: max(compute, forward + seconds), BOUND: max(compute, seconds)}


def _steady(
    workload: Workload, wrapped: Wrapped, times: int, *, clip: Callable[[Iterable[Any], float], object] | None = None
) -> Steady:
    def step() -> None:
        wrapped.backward(workload.forward(wrapped.model))
        if clip is not None:
            clip(wrapped.model.parameters(), MAX_NORM)
        wrapped.optimizer.step()
        wrapped.optimizer.zero_grad()

    return Steady(step=step, flush=wrapped.flush, times=times)
