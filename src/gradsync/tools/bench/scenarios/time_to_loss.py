"""When a loss is reached, by what is sent: fewer bytes make steps shorter, and may make more of them necessary.

This is the measure that counts: seconds until the loss is as low as after a given number of exact steps, over a link
that is really limited, with the small GPT of ``gradsync train``. Every way of synchronizing starts from the same
weights and reads the same text. What gradsync does in the first windows to find its settings is inside the times; the
evaluation at the end of a round, on text that no rank trains on, is not.

``time-to-loss`` compares reductions over a link of 100 Mbit/s; ``far`` compares what suits links with the delays of the
internet.
"""

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync.observe.charts.canvas import INK, colour
from gradsync.observe.charts.kinds import Series, draw_curves
from gradsync.optim.local_steps import is_local_steps, local_steps_by_name
from gradsync.tools.bench.measure import CellRounds, Step
from gradsync.tools.bench.peers import Gradsync, GradsyncLocal, OuterSGD, Peer, TorchFT
from gradsync.tools.bench.record import Cell, CellRecord, Sample
from gradsync.tools.bench.scenario import Picture, Scenario, Table, cell, picture, spread, table_of
from gradsync.tools.bench.scenarios.convergence import LOSS_LABEL, SYMBOLS, SplitText, learning, mean_curve
from gradsync.tools.bench.workload import window_step
from gradsync.tools.llm.model import build_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Curves", "Far", "Reached", "TimeToLoss", "reduction_name"]

EXACT, LOW_RANK, LOCAL = "float32", "low-rank:4", "local:16"
# With its published outer learning rate and momentum; names in small letters have ours.
DILOCO, TORCHFT = "DiLoCo:16", "torchft DiLoCo:16"
FAR_TORCHFT = "torchft DiLoCo:32"
COLOURS = {
    EXACT: INK,
    "bf16": colour("sky"),
    "int8": colour("blue"),
    "int4": colour("green"),
    LOW_RANK: colour("vermillion"),
    LOCAL: colour("pink"),
    DILOCO: colour("orange"),
    TORCHFT: colour("dark-grey"),
    "top-k:0.01:int2": colour("vermillion"),
    "diloco:32": colour("orange"),
    "diloco:32:int2": colour("sky"),
    "diloco:32:top-k:0.05:int2": colour("blue"),
    FAR_TORCHFT: colour("dark-grey"),
}

MODEL, LENGTH = "tiny", 64
STEPS_A_ROUND = 25
# The steps that set the target, and how many more others may take for it.
TARGET_STEPS, MORE = 500, 1.2
# Points of a curve that count together.
SMOOTHED = 3
HELD_OUT_SEQUENCES = 64


def reduction_name(reduction: str, seed: int) -> str:
    return f"{reduction} · seed {seed}"


def steps_a_round(reduction: str, steps: int = STEPS_A_ROUND) -> int:
    """What needs more steps than others, and takes less time for each, gets more of them in a round."""
    return steps * (1 if reduction in (EXACT, "bf16", "int8", "int4") else 2)


class TimeToLoss(Scenario):
    """Seconds and steps to the loss that exact steps reach, by what is sent."""

    name = "time-to-loss"
    title = "Time to a loss, over a slow link"
    source = "After Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022."
    question = "Does training get anywhere sooner if less is sent, and how much?"
    sent: ClassVar[Sequence[str]] = (EXACT, "bf16", "int8", "int4", LOW_RANK, LOCAL, DILOCO, TORCHFT)

    def cells(self, *, quick: bool) -> list[Cell]:
        target, seeds = (100, 1) if quick else (TARGET_STEPS, 3)
        rounds = round(target * MORE / STEPS_A_ROUND)
        return [
            cell(
                "small GPT",
                quick=quick,
                each=seeds * STEPS_A_ROUND * len(self.sent) * 0.09,
                hosts=2,
                rate="100mbit",
                warmup=0,
                rounds=(rounds, rounds),
                emulated=False,
                options={"seeds": seeds, "target": target, "batch": 4, "learning rate": 2e-3},
            )
        ]

    def measure(self, rounds: CellRounds) -> None:
        options = rounds.cell.options
        text = SplitText.read(held_out=HELD_OUT_SEQUENCES, length=LENGTH)
        variants: dict[str, Step] = {}
        for reduction in self.sent:
            peer = _peer(reduction)
            reason = peer.absent()
            for seed in range(options["seeds"]):
                if reason is not None:
                    rounds.absent(reduction_name(reduction, seed), reason)
                    continue
                variants[reduction_name(reduction, seed)] = _training(reduction, peer, text, seed, options)
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


class Far(TimeToLoss):
    """The same over links as on the internet, with delays, by what suits them."""

    name = "far"
    title = "Time to a loss, over the internet"
    source = "After Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023."
    question = "How much sooner does training get somewhere if far hosts send rarely, and little?"
    sent = (
        *(EXACT, "int4", "top-k:0.01:int2", "diloco:32", "diloco:32:int2", "diloco:32:top-k:0.05:int2"),
        FAR_TORCHFT,
    )

    def cells(self, *, quick: bool) -> list[Cell]:
        # Whole cycles of local steps, or a round would end with an early synchronization.
        steps, seeds = 32, 1 if quick else 3
        target = steps * (4 if quick else 12)
        rounds = round(target * MORE / steps)
        # An exact step takes nearly all of the time.
        return [
            cell(
                f"small GPT, {delay * 1000:.0f} ms",
                quick=quick,
                each=seeds * steps * each * 2,
                hosts=2,
                rate=rate,
                delay=delay,
                warmup=0,
                rounds=(rounds, rounds),
                emulated=False,
                options={"seeds": seeds, "target": target, "batch": 4, "learning rate": 1e-3, "steps": steps},
            )
            for rate, delay, each in (("100mbit", 0.02, 0.3), ("10mbit", 0.05, 2.0))
        ]


def _training(reduction: str, peer: Peer, text: SplitText, seed: int, options: Mapping[str, Any]) -> Step:
    """The steps of a round, of one way of synchronizing and from one seed."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = build_model(MODEL, vocab_size=SYMBOLS, sequence_length=LENGTH)
    wrapped = peer.wrap(model, partial(torch.optim.AdamW, lr=options["learning rate"], foreach=True))

    def forward(model: nn.Module) -> Tensor:
        return sequence_loss(model, text.own(options["batch"] * dist.get_world_size(), generator))

    steps = window_step(wrapped, forward, times=steps_a_round(reduction, options.get("steps", STEPS_A_ROUND)))
    return learning(steps, lambda: sequence_loss(model, text.held_out))


def _peer(reduction: str) -> Peer:
    if reduction in (TORCHFT, FAR_TORCHFT):
        return TorchFT(every=int(reduction.rpartition(":")[2]))
    if reduction == DILOCO:
        return GradsyncLocal(arguments=lambda: {"every": 16, "outer": OuterSGD})
    if is_local_steps(reduction):
        return GradsyncLocal(arguments=partial(local_steps_by_name, reduction))
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

    def steps_a_round(self, reduction: str) -> int:
        return steps_a_round(reduction, int(self.record.cell.options.get("steps", STEPS_A_ROUND)))

    @cached_property
    def reductions(self) -> list[str]:
        """The reductions that have run with every seed."""
        samples = self.record.samples
        return [name for name in COLOURS if all(reduction_name(name, seed) in samples for seed in self.seeds)]

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
        return statistics.median(rounds) / self.steps_a_round(reduction)

    def sent(self, reduction: str) -> float:
        """The mean of the bytes of a step: not all of them send."""
        rounds = [sample.sent for seed in self.seeds for sample in self._samples(reduction, seed)]
        return statistics.fmean(rounds) / self.steps_a_round(reduction)

    def at_target(self, reduction: str) -> list[float]:
        """The losses after as many steps as set the target, seed by seed; fewer than seeds where that was not run."""
        place = self.target_steps // self.steps_a_round(reduction) - 1
        curves = (self.losses(reduction, seed) for seed in self.seeds)
        return [losses[place] for losses in curves if len(losses) > place]

    def reached(self, reduction: str, seed: int) -> Reached | None:
        """When the loss was first as low as that of the exact steps; None if it never was."""
        targets = self.at_target(EXACT) if EXACT in self.reductions else []
        if seed >= len(targets):
            return None
        target, each = targets[seed], self.steps_a_round(reduction)
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
    count = curves.steps_a_round(name)
    places = [number * count if by_steps else statistics.fmean(each) for number, each in enumerate(seconds, 1)]
    return mean_curve(name, places, losses, colour=COLOURS[name])
