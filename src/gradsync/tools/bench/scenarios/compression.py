"""Sending fewer bytes: what a step gains from it and what compressing costs, and when a loss is reached.

``compression``: steps with real compute between hosts. All compression runs inside the timed step. torch's own hooks
get the same settings: fp16, and PowerSGD of the same rank with warm start and error feedback, which compresses from its
third step on. Steps follow each other without a pause, because that is where compression has to be fast enough.

``time-to-loss`` is the measure that counts: seconds until the loss is as low as after a given number of exact steps,
over a link that is really limited, with the small GPT of ``gradsync train``. Fewer bytes make steps shorter, and may
make more of them necessary; this shows both at once. Every way of synchronizing starts from the same weights and reads
the same text. What gradsync does in the first windows to find its settings is inside the times; the
evaluation at the end of a round, on text that no rank trains on, is not.
"""

import statistics
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync.observe.charts.canvas import INK, colour
from gradsync.observe.charts.kinds import Series, draw_curves, draw_rows
from gradsync.tools.bench.measure import CellRounds, Step
from gradsync.tools.bench.peers import (
    AUTO,
    DDP,
    OURS,
    TUNED,
    Gradsync,
    GradsyncLocal,
    NoWrapper,
    OuterSGD,
    Peer,
    TorchFT,
)
from gradsync.tools.bench.record import Cell, CellRecord, Sample
from gradsync.tools.bench.scenario import (
    Picture,
    Scenario,
    Table,
    cell,
    colour_of,
    known,
    or_missing,
    picture,
    spread,
    table_of,
)
from gradsync.tools.bench.scenarios.convergence import LOSS_LABEL, SYMBOLS, SplitText, learning, mean_curve
from gradsync.tools.bench.workload import Lineup, tuned_ddp, window_step
from gradsync.tools.llm.model import build_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Compression", "TimeToLoss"]

REDUCTIONS = ("bf16", "fp16", "int8", "int4", "sign", "low-rank:4", "top-k:0.01", AUTO)
FP16, POWER = "DDP tuned, fp16 hook", "DDP tuned, PowerSGD 4"
RATES = ("100mbit", "400mbit", "1gbit")
STEPS_A_SAMPLE = 3
# Over Gloo, PowerSGD's collectives of one bucket meet those of another on the other rank, and the process is aborted.
ONE_BUCKET = 1000.0


def variant_name(reduction: str) -> str:
    return f"{OURS} {reduction}"


SHOWN = (FP16, POWER, OURS, *map(variant_name, REDUCTIONS))


class Compression(Scenario):
    """Time and bytes of a step, by what is sent, over the rate of the link."""

    name = "compression"
    title = "Compression: fewer bytes, and what they cost"
    source = "After Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022."
    question = "From which link on does a step become faster if fewer bytes are sent?"
    baseline = TUNED
    slug, height, shared = "steps", 4.8, False

    def cells(self, *, quick: bool) -> list[Cell]:
        each = (len(REDUCTIONS) + 5) * STEPS_A_SAMPLE * 0.8
        options = {"layers": 6, "width": 256, "batch": 2, "length": 128}
        fixed: dict[str, Any] = {"quick": quick, "each": each, "warmup": 2, "rounds": (5, 15), "options": options}
        hosts_and_rates = [(2, "400mbit")] if quick else [*((2, rate) for rate in RATES), (4, "1gbit")]
        return [cell("GPT 5M", ranks=hosts, hosts=hosts, rate=rate, **fixed) for hosts, rate in hosts_and_rates]

    def measure(self, rounds: CellRounds) -> None:
        lineup = Lineup(rounds)
        tuned = tuned_ddp(rounds, lineup.workload)
        peers: list[Peer] = [
            NoWrapper(),
            tuned,
            DDP(name=FP16, tuned=True, hook="fp16", bucket_mb=tuned.bucket_mb),
            DDP(name=POWER, tuned=True, hook="powersgd", bucket_mb=ONE_BUCKET),
            Gradsync(),
            *(Gradsync(name=variant_name(reduction), reduction=reduction) for reduction in REDUCTIONS),
        ]
        for peer in peers:
            lineup.add(peer, times=STEPS_A_SAMPLE)
        lineup.settle()
        rounds.fact(AUTO, lineup.model(variant_name(AUTO)).synchronizer.reduction.report)
        lineup.run()

    def note(self, record: CellRecord) -> str:
        auto = f" Auto: {record.facts[AUTO]}." if AUTO in record.facts else ""
        return f"Times and bytes of {STEPS_A_SAMPLE} steps.{auto}"

    def draw(self, axes: "Axes", record: CellRecord) -> None:
        rows = {name: record.ms(name) / STEPS_A_SAMPLE for name in record.samples}
        draw_rows(axes, rows, {name: colour_of(name) for name in rows}, form="{:.0f} ms", bold=variant_name("int8"))
        axes.set_xlabel("ms a step (median)")

    def overview(self, records: Sequence[CellRecord]) -> list[Table]:
        def faster(record: CellRecord, name: str) -> str:
            return or_missing(record.times(TUNED, name), "{:.2f}×")

        def fewer(record: CellRecord, name: str) -> str | None:
            known = {name, OURS} <= record.samples.keys() and record.sent(OURS)
            return f"{record.sent(name) / record.sent(OURS):.3f}" if known else None

        columns = {("float32" if name == OURS else name): name for name in SHOWN}
        tables = {"Against tuned DDP, times as fast": faster, "Bytes, of gradsync's in float32": fewer}
        return [
            table_of(
                title,
                [{"cell": each.cell.name, **{key: words(each, columns[key]) for key in columns}} for each in records],
            )
            for title, words in tables.items()
        ]

    def message(self, records: Sequence[CellRecord]) -> str:
        gains = known({record.cell.name: _best(record) for record in records})
        if not gains:
            return self.title
        cell = max(gains, key=lambda name: gains[name])
        return f"With fewer bytes a step is up to {gains[cell]:.1f} times as fast ({cell})"

    def sentence(self, record: CellRecord) -> str:
        gain = _best(record)
        return "" if gain is None else f"{record.cell.name}: up to {gain:.2f} times as fast as tuned DDP."


def _best(record: CellRecord) -> float | None:
    gains = known({name: record.times(TUNED, name) for name in map(variant_name, REDUCTIONS)})
    return max(gains.values(), default=None)


# -- time to a loss ----------------------------------------------------------------------------------------------------

LOCAL_STEPS = 16
EXACT, LOW_RANK, LOCAL = "float32", "low-rank:4", f"local:{LOCAL_STEPS}"
DILOCO, TORCHFT = f"DiLoCo:{LOCAL_STEPS}", f"torchft DiLoCo:{LOCAL_STEPS}"
SENT_COLOURS = {
    EXACT: INK,
    "bf16": colour("sky"),
    "int8": colour("blue"),
    "int4": colour("green"),
    LOW_RANK: colour("vermillion"),
    LOCAL: colour("pink"),
    DILOCO: colour("orange"),
    TORCHFT: colour("dark-grey"),
}
# What needs more steps than others, and takes less time for each, gets more of them in a round.
MORE_STEPS = dict.fromkeys((LOW_RANK, LOCAL, DILOCO, TORCHFT), 2)

MODEL, LENGTH = "tiny", 64
LEARNING_RATE = 2e-3
STEPS_A_ROUND = 25
# The steps that set the target, and how many more others may take for it.
TARGET_STEPS, MORE = 500, 1.2
# Points of a curve that count together.
SMOOTHED = 3
HELD_OUT_SEQUENCES = 64


def reduction_name(reduction: str, seed: int) -> str:
    return f"{reduction} · seed {seed}"


def steps_a_round(reduction: str) -> int:
    return STEPS_A_ROUND * MORE_STEPS.get(reduction, 1)


class TimeToLoss(Scenario):
    """Seconds and steps to the loss that exact steps reach, by what is sent."""

    name = "time-to-loss"
    title = "Time to a loss, over a slow link"
    source = "After Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022."
    question = "Does training get anywhere sooner if less is sent, and how much?"

    def cells(self, *, quick: bool) -> list[Cell]:
        target, seeds = (100, 1) if quick else (TARGET_STEPS, 3)
        rounds = round(target * MORE / STEPS_A_ROUND)
        return [
            cell(
                "small GPT",
                quick=quick,
                each=seeds * STEPS_A_ROUND * len(SENT_COLOURS) * 0.09,
                hosts=2,
                rate="100mbit",
                warmup=0,
                rounds=(rounds, rounds),
                emulated=False,
                options={"seeds": seeds, "target": target, "batch": 4},
            )
        ]

    def measure(self, rounds: CellRounds) -> None:
        options = rounds.cell.options
        text = SplitText.read(held_out=HELD_OUT_SEQUENCES, length=LENGTH)
        variants: dict[str, Step] = {}
        for reduction in SENT_COLOURS:
            peer = _peer(reduction)
            reason = peer.absent()
            for seed in range(options["seeds"]):
                if reason is not None:
                    rounds.absent(reduction_name(reduction, seed), reason)
                    continue
                variants[reduction_name(reduction, seed)] = _training(reduction, peer, text, seed, options["batch"])
        model = build_model(MODEL, vocab_size=SYMBOLS, sequence_length=LENGTH)
        rounds.fact("gradient bytes", sum(parameter.nbytes for parameter in model.parameters()))
        rounds.run(variants)

    def tables(self, records: Sequence[CellRecord]) -> list[Table]:
        return [_target_table(Curves(record)) for record in records]

    def pictures(self, records: Sequence[CellRecord]) -> list[Picture]:
        def draw(axes: "Axes", curves: Curves, *, by_steps: bool) -> None:
            draw_curves(axes, [_target_curve(curves, name, by_steps=by_steps) for name in curves.reductions])
            axes.set_xlabel("steps" if by_steps else "seconds of training")
            axes.set_xlim(left=0)

        pictures = []
        for number, record in enumerate(records):
            axis = partial(draw, curves=Curves(record))
            panels = [("over seconds", partial(axis, by_steps=False)), ("over steps", partial(axis, by_steps=True))]
            title = self.sentence(record)
            pictures.append(picture(f"loss-{number}", title, panels, reading=title, ylabel=LOSS_LABEL, height=4.4))
        return pictures

    def sentence(self, record: CellRecord) -> str:
        curves = Curves(record)
        target = f"the loss of {curves.target_steps} exact steps"
        others = [name for name in curves.reductions if name != EXACT]
        gains = {name: statistics.fmean(each) for name in others if (each := curves.gains(name))}
        if not gains:
            return f"{record.cell.name}: nothing has reached {target}."
        best = max(gains, key=lambda name: gains[name])
        return f"With {best} {target} is reached {gains[best]:.1f} times as soon."


def _training(reduction: str, peer: Peer, text: SplitText, seed: int, batch: int) -> Step:
    """The steps of a round, of one way of synchronizing and from one seed."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = build_model(MODEL, vocab_size=SYMBOLS, sequence_length=LENGTH)
    wrapped = peer.wrap(model, partial(torch.optim.AdamW, lr=LEARNING_RATE, foreach=True))

    def forward(model: nn.Module) -> Tensor:
        return sequence_loss(model, text.own(batch * dist.get_world_size(), generator))

    steps = window_step(wrapped, forward, times=steps_a_round(reduction))
    return learning(steps, lambda: sequence_loss(model, text.held_out))


def _peer(reduction: str) -> Peer:
    if reduction in (LOCAL, DILOCO):
        return GradsyncLocal(every=LOCAL_STEPS, outer=OuterSGD if reduction == DILOCO else None)
    if reduction == TORCHFT:
        return TorchFT(every=LOCAL_STEPS)
    return Gradsync(reduction=None if reduction == EXACT else reduction)


def sequence_loss(model: nn.Module, sequences: Tensor) -> Tensor:
    return F.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())


class Reached(NamedTuple):
    """The moment when a target was reached."""

    steps: float
    seconds: float


class Curves:
    """A cell by reduction and seed: the losses, and the seconds, after every round."""

    def __init__(self, record: CellRecord) -> None:
        self.record = record
        self.target_steps = int(record.cell.options["target"])
        self.seeds = range(int(record.cell.options["seeds"]))

    @cached_property
    def reductions(self) -> list[str]:
        """The reductions that have run with every seed."""
        samples = self.record.samples
        return [name for name in SENT_COLOURS if all(reduction_name(name, seed) in samples for seed in self.seeds)]

    def losses(self, reduction: str, seed: int) -> list[float]:
        """The mean of the last few losses, after every round: single ones vary by as much as they fall in one."""
        losses = [sample.parts["loss"] for sample in self._samples(reduction, seed)]
        return [statistics.fmean(losses[max(0, end - SMOOTHED) : end]) for end in range(1, len(losses) + 1)]

    def seconds(self, reduction: str, seed: int) -> list[float]:
        """The seconds since the beginning, after every round."""
        return list(accumulate(sample.parts["training"] for sample in self._samples(reduction, seed)))

    def step(self, reduction: str) -> float:
        """The median seconds of a step."""
        rounds = [sample.parts["training"] for seed in self.seeds for sample in self._samples(reduction, seed)]
        return statistics.median(rounds) / steps_a_round(reduction)

    def sent(self, reduction: str) -> float:
        """The mean of the bytes of a step: not all of them send."""
        rounds = [sample.sent for seed in self.seeds for sample in self._samples(reduction, seed)]
        return statistics.fmean(rounds) / steps_a_round(reduction)

    def at_target(self, reduction: str) -> list[float]:
        """The losses after as many steps as set the target, seed by seed; fewer than seeds where that was not run."""
        place = self.target_steps // steps_a_round(reduction) - 1
        curves = (self.losses(reduction, seed) for seed in self.seeds)
        return [losses[place] for losses in curves if len(losses) > place]

    def reached(self, reduction: str, seed: int) -> Reached | None:
        """When the loss was first as low as that of the exact steps; None if it never was."""
        targets = self.at_target(EXACT) if EXACT in self.reductions else []
        if seed >= len(targets):
            return None
        target, each = targets[seed], steps_a_round(reduction)
        both = zip(self.losses(reduction, seed), self.seconds(reduction, seed), strict=True)
        points = [(loss, Reached(number * each, seconds)) for number, (loss, seconds) in enumerate(both, 1)]
        for (above, before), (loss, after) in pairwise([*points[:1], *points]):
            if loss <= target:
                share = (above - target) / (above - loss) if above > loss else 0.0
                return Reached(*(first + share * (second - first) for first, second in zip(before, after, strict=True)))
        return None

    def gains(self, reduction: str) -> list[float]:
        """How many times as soon as with exact means, by the seeds that reached the target."""
        pairs = [(self.reached(EXACT, seed), self.reached(reduction, seed)) for seed in self.seeds]
        return [exact.seconds / other.seconds for exact, other in pairs if exact is not None and other is not None]

    def _samples(self, reduction: str, seed: int) -> list[Sample]:
        samples = self.record.samples[reduction_name(reduction, seed)]
        return [samples[number] for number in sorted(samples)]


def _target_table(curves: Curves) -> Table:
    def row(name: str) -> dict[str, object]:
        reached = [arrival for seed in curves.seeds if (arrival := curves.reached(name, seed)) is not None]
        return {
            "sent": name,
            "ms a step": f"{curves.step(name) * 1e3:.1f}",
            "MB a step": f"{curves.sent(name) / 1e6:.3f}",
            f"loss after {curves.target_steps} steps": spread(curves.at_target(name), ".3f"),
            "seeds that got there": f"{len(reached)} of {len(curves.seeds)}",
            "steps": spread([arrival.steps for arrival in reached], ".0f"),
            "seconds": spread([arrival.seconds for arrival in reached], ".1f"),
            "times as soon": spread(curves.gains(name), ".2f"),
        }

    return table_of(
        f"{curves.record.cell.name}: to the loss of {curves.target_steps} exact steps",
        map(row, curves.reductions),
        note=(
            f"{len(curves.seeds)} seed{'s: mean, lowest and highest' if len(curves.seeds) > 1 else ''}. The loss is "
            f"that of held-out text, mean of {SMOOTHED} points; the target of a seed is the one that its exact steps "
            "reach. Seconds are those of training, with compression and the search for settings, without evaluation."
        ),
    )


def _target_curve(curves: Curves, name: str, *, by_steps: bool) -> Series:
    """The mean over seeds of the loss, and of the seconds it took."""
    losses = list(zip(*(curves.losses(name, seed) for seed in curves.seeds), strict=False))
    seconds = list(zip(*(curves.seconds(name, seed) for seed in curves.seeds), strict=False))
    count = steps_a_round(name)
    places = [number * count if by_steps else statistics.fmean(each) for number, each in enumerate(seconds, 1)]
    return mean_curve(name, places, losses, colour=SENT_COLOURS[name])
